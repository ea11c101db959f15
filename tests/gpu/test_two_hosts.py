"""Two "hosts" of one machine, which share no memory: each rank has a /dev/shm of its own and, on GPUs, one GPU.

    python -m pytest -q -rs tests/gpu/test_two_hosts.py          # as root; 2 GPUs, about two minutes

The host name is the same, as NVSHMEM refuses ranks of two names without an adapter. `-far` sends by NVSHMEM's puts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.faults import MAX_POSITION, errors, generate_command, wait_for_tokens, write_config
from support.helpers import DISTMK, Runner
from support.machine import FAR, environment, on, require
from support.tiny_config import tiny_config

pytestmark = pytest.mark.timeout(300)
MODEL = ("--model", "smollm2-135m", "--load-format", "dummy")
PROMPT = ("--prompt-ids", "1,2,3,4", "--max-new-tokens", "8", "--max-model-len", "64", "--ignore-eos", "--json")
CONFIG = tiny_config(hidden_size=384, intermediate_size=512, head_dim=64, vocab_size=1000, max_position=MAX_POSITION)
GPUS = [on("cuda", {}, num_ranks=2, id="cuda"), on("cuda", FAR, num_ranks=2, id="cuda-far")]


def start(runner: Runner, command: list[str], nodes: dict[str, str]) -> list[subprocess.Popen[str]]:
    """The command on two ranks, each in a mount namespace with a /dev/shm of its own. Skips where that is not allowed."""
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("a /dev/shm of each rank's own needs root and unshare")
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "2"}
    meet |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "DISTMK_AUTHKEY": secrets.token_hex(32)}
    apart = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", *command]
    return [
        runner.start(apart, environment(**meet, **nodes, RANK=str(rank), CUDA_VISIBLE_DEVICES=str(rank)))
        for rank in range(2)
    ]


@pytest.mark.parametrize(("backend", "nodes"), GPUS)  # tests/multinode has the host twin's
def test_same_tokens(runner: Runner, backend: str, nodes: dict[str, str]) -> None:
    """Those of one rank, from both."""
    require(backend, 2)
    command = [*DISTMK, "generate", *MODEL, *PROMPT, "--backend", backend]
    alone = runner.run(command, environment())
    assert alone.status == 0, alone.stderr
    finished = [runner.finish(process) for process in start(runner, command, nodes)]
    assert all(each.status == 0 for each in finished), finished
    (expected,), (found,) = alone.objects(), finished[0].objects()
    assert (found["token_ids"], found["tensor_parallel"]) == (expected["token_ids"], 2)


@pytest.mark.parametrize(("backend", "nodes"), [on("host", {}), *GPUS])
def test_loss_of_a_host(runner: Runner, tmp_path: Path, backend: str, nodes: dict[str, str]) -> None:
    """The other one names it and ends within seconds."""
    require(backend, 2)
    config = write_config(CONFIG, tmp_path / "config.json")
    workers = "1" if backend == "host" else "8"
    command = generate_command(config, "--backend", backend, "--workers", workers, "--max-num-seqs", "2")
    first, second = start(runner, [sys.executable, *command[1:]], nodes)
    wait_for_tokens(first)
    began = time.monotonic()
    second.send_signal(signal.SIGKILL)  # unshare and sh have become the rank
    done = runner.finish(first)
    took_s = time.monotonic() - began
    runner.finish(second)
    print(f"ended after {took_s:.1f} s")
    assert (done.status, errors(done)) == (4, ["distmk: rank 1 left or died"]), done
    assert took_s < 10
