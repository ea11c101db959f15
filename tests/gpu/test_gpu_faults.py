"""Ranks that die, signals that never come and interrupts, with ranks on GPUs, which work again afterwards.

    python -m pytest -q -rs tests/gpu/test_gpu_faults.py -k cuda         # 2 GPUs, about 2 minutes
    python -m pytest -q tests/gpu/test_gpu_faults.py -k host             # the same tests on the host twin

tests/backends/host/test_faults.py has more of them, on the host twin alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import (
    GONE_S,
    MAX_POSITION,
    check_hang,
    errors,
    event_between,
    generate_command,
    pid_of,
    wait_for_tokens,
    write_config,
)
from support.helpers import Finished, Runner, under_mpirun, with_ranks
from support.machine import FAR, environment, on, require, sharing, virtual_hosts
from support.tiny_config import tiny_config

from distmk.backends.defaults import backend_choices
from distmk.lower import DecodeOptions, lower
from distmk.models import build_model
from distmk.program.program import compile_graph

pytestmark = pytest.mark.timeout(300)
BACKENDS = pytest.mark.parametrize("backend", [on("host"), on("cuda", num_ranks=2)])
WORKERS = {"host": 1, "cuda": 8}
CONFIG = tiny_config(hidden_size=384, intermediate_size=512, head_dim=64, vocab_size=1000, max_position=MAX_POSITION)
Command = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The command of a generate that goes on for minutes."""
    config = write_config(CONFIG, tmp_path / "config.json")

    def make(backend: str, *more: str, tokens: int = 150_000) -> list[str]:
        options = ("--backend", backend, "--workers", str(WORKERS[backend]), "--max-num-seqs", "2")
        return generate_command(config, *options, *more, tokens=tokens)

    return make


@pytest.fixture(scope="module")
def healthy() -> dict[str, str]:
    """The output of an undisturbed run, by backend."""
    return {}


def check_usable(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    """Fail unless two new ranks generate the same tokens as before."""
    done = runner.run(with_ranks(2)(command(backend, tokens=32)), environment())
    assert done.status == 0 and len(done.stdout.split()) == 32, (done.status, done.stderr)
    assert done.stdout == healthy.setdefault(backend, done.stdout), done.stderr


def finish_soon(runner: Runner, process: subprocess.Popen[str]) -> Finished:
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


@BACKENDS
def test_usable(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    """First of all: two undisturbed runs print the same, with which later ones are compared."""
    require(backend, 2)
    check_usable(runner, command, backend, healthy)
    check_usable(runner, command, backend, healthy)


@BACKENDS
def test_killed_rank(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    require(backend, 2)
    process = runner.start(with_ranks(2)(command(backend)), environment())
    wait_for_tokens(process)
    os.kill(pid_of(runner, 1), signal.SIGKILL)
    done = finish_soon(runner, process)
    assert done.status == 4 and len(errors(done)) == 1, (done.status, done.stderr)
    assert re.match(r"distmk: rank 1\b", errors(done)[0]), done.stderr
    runner.check_nothing_left()
    check_usable(runner, command, backend, healthy)


@BACKENDS
def test_killed_rank_0(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    require(backend, 2)
    process = runner.start(with_ranks(2)(command(backend)), environment())
    wait_for_tokens(process)
    process.kill()
    runner.finish(process)
    runner.check_nothing_left(GONE_S)
    check_usable(runner, command, backend, healthy)


@BACKENDS
def test_killed_rank_under_mpirun(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    """mpirun ends the other ranks; neither processes nor GPUs stay occupied."""
    require(backend, 2)
    process = runner.start(under_mpirun(2)(command(backend)), environment())
    started = pid_of(runner, 1)
    wait_until_running(started, backend)
    os.kill(started, signal.SIGKILL)
    done = finish_soon(runner, process)
    assert done.status != 0
    runner.check_nothing_left()
    check_usable(runner, command, backend, healthy)


def wait_until_running(pid: int, backend: str) -> None:
    """Wait until the process has loaded the runtime: mpirun holds back lines that have not ended, so no token shows."""
    library, deadline = "nvshmem" if backend == "cuda" else "/host-", time.monotonic() + 60
    while library not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline, f"{library} was not loaded"
        time.sleep(0.05)
    time.sleep(4 if backend == "cuda" else 1.5)


@BACKENDS
@pytest.mark.parametrize("consumer", ["layer0.o.reduce", "iteration barrier"])
def test_signal_that_never_comes(
    runner: Runner, command: Command, backend: str, healthy: dict[str, str], consumer: str
) -> None:
    require(backend, 2)
    lose_a_signal(runner, command, backend, consumer, environment())
    check_usable(runner, command, backend, healthy)


@pytest.mark.gpu
def test_a_far_rank_hears_of_a_hang(runner: Runner, command: Command) -> None:
    """Over the network, as if it were on another host."""
    require("cuda")
    lose_a_signal(runner, command, "cuda", "iteration barrier", sharing(2, **FAR))


def lose_a_signal(runner: Runner, command: Command, backend: str, consumer: str, env: dict[str, str]) -> None:
    source, target = (0, 1) if consumer == "iteration barrier" else (1, 0)
    sizes: dict[str, Any] = {"max_seqs": 2, "max_model_len": 4116, "host_sizes": virtual_hosts(env, 2)}
    options = DecodeOptions(2, WORKERS[backend], **sizes, **backend_choices(backend))
    program = compile_graph(lower(build_model(CONFIG), options))
    event, waiter = event_between(program, source, target, consumer)
    fault = {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},7"}
    start = with_ranks(2)(command(backend, "--deadline", "2", tokens=4100))
    done = runner.run(start, env | fault)
    assert "Exception ignored" not in done.stderr, done.stderr
    check_hang(done, target, event, waiter)
    runner.check_nothing_left()


@BACKENDS
def test_interrupted(runner: Runner, command: Command, backend: str, healthy: dict[str, str]) -> None:
    require(backend, 2)
    process = runner.start(with_ranks(2)(command(backend)), environment())
    wait_for_tokens(process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish_soon(runner, process)
    assert done.status == 130 and errors(done) == ["distmk: interrupted"], (done.status, done.stderr)
    runner.check_nothing_left()
    check_usable(runner, command, backend, healthy)
