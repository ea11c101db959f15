"""Two "hosts" of one machine, which share no memory: each has a /dev/shm and, on GPUs, GPUs of its own.

    python -m pytest -q -rs tests/gpu/test_two_hosts.py          # as root; 2 or 4 GPUs, about two minutes for each number

The host name is the same, as NVSHMEM refuses ranks of two names without an adapter. `-far` sends by NVSHMEM's puts.
"""

from __future__ import annotations

import os
import re
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
from support.machine import environment, on, require
from support.tiny_config import tiny_config

pytestmark = pytest.mark.timeout(300)
MODEL = ("--model", "smollm2-135m", "--load-format", "dummy")
PROMPT = ("--prompt-ids", "1,2,3,4", "--max-new-tokens", "8", "--max-model-len", "64", "--ignore-eos", "--json")
CONFIG = tiny_config(hidden_size=384, intermediate_size=512, head_dim=64, vocab_size=1000, max_position=MAX_POSITION)
GPUS = [
    on("cuda", num, is_far, num_ranks=2 * num, id=f"cuda-{num}{'-far' if is_far else ''}")
    for num in (1, 2)
    for is_far in (False, True)
]
# The first rank takes the shell's place, so that its exit status is that of the host.
START_RANKS = """mount -t tmpfs tmpfs /dev/shm || exit 1
for local in $(seq $((LOCAL_WORLD_SIZE - 1))); do LOCAL_RANK=$local RANK=$((RANK + local)) "$@" & done
exec "$@"
"""


def start(runner: Runner, command: list[str], num_local: int, is_far: bool = False) -> list[subprocess.Popen[str]]:
    """The command on two hosts of `num_local` ranks, each in a mount namespace. Skips where that is not allowed."""
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("a /dev/shm of each host's own needs root and unshare")
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.getsockname()[1]),
            "WORLD_SIZE": str(2 * num_local),
        }
    meet |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_local), "DISTMK_AUTHKEY": secrets.token_hex(32)}
    meet |= {"DISTMK_VIRTUAL_NODE_SIZE": str(num_local)} if is_far else {}
    apart = ["unshare", "-m", "sh", "-c", START_RANKS, "sh", *command]
    started = []
    for first in (0, num_local):
        gpus = ",".join(map(str, range(first, first + num_local)))
        started.append(runner.start(apart, environment(**meet, RANK=str(first), CUDA_VISIBLE_DEVICES=gpus)))
    return started


@pytest.mark.parametrize(("backend", "num_local", "is_far"), GPUS)  # tests/multinode has the host twin's
def test_same_tokens(runner: Runner, backend: str, num_local: int, is_far: bool) -> None:
    """Those of one rank, from both."""
    require(backend, 2 * num_local)
    command = [*DISTMK, "generate", *MODEL, *PROMPT, "--backend", backend]
    alone = runner.run(command, environment())
    assert alone.status == 0, alone.stderr
    finished = [runner.finish(process) for process in start(runner, command, num_local, is_far)]
    assert all(each.status == 0 for each in finished), finished
    (expected,), (found,) = alone.objects(), finished[0].objects()
    assert (found["token_ids"], found["tensor_parallel"]) == (expected["token_ids"], 2 * num_local)


@pytest.mark.parametrize(
    ("backend", "num_local", "is_far"), [on("host", 1, False), on("host", 2, False, slow=True), *GPUS]
)
def test_loss_of_a_host(runner: Runner, tmp_path: Path, backend: str, num_local: int, is_far: bool) -> None:
    """The other one's ranks name some or all that are lost, and end within seconds."""
    require(backend, 2 * num_local)
    config = write_config(CONFIG, tmp_path / "config.json")
    workers = "1" if backend == "host" else "8"
    command = generate_command(config, "--backend", backend, "--workers", workers, "--max-num-seqs", "2")
    first, second = start(runner, [sys.executable, *command[1:]], num_local, is_far)
    wait_for_tokens(first)
    began = time.monotonic()
    os.killpg(second.pid, signal.SIGKILL)  # unshare and sh have become ranks
    done = runner.finish(first)
    took_s = time.monotonic() - began
    runner.finish(second)
    print(f"ended after {took_s:.1f} s")
    lost = {1: "rank 1", 2: "(rank 2|rank 3|ranks 2, 3)"}[num_local]
    assert done.status == 4 and len(errors(done)) == num_local, done
    assert all(re.fullmatch(f"distmk: {lost} left or died", line) for line in errors(done)), done
    assert took_s < 10
