"""Ranks that die, signals that never come and interrupts, with ranks on GPUs, which work again afterwards.

    python -m pytest -q -rs tests/gpu/test_gpu_faults.py -k cuda         # 2 or 4 GPUs, about 2 minutes for each number
    python -m pytest -q tests/gpu/test_gpu_faults.py -k host             # the same tests on the host twin

tests/backends/host/test_faults.py has more of them, on the host twin alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
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
from support.helpers import Finished, Launcher, Runner, under_mpirun, with_ranks
from support.machine import FAR, environment, on, require, sharing, virtual_hosts
from support.tiny_config import tiny_config

from distmk.backends.defaults import backend_choices
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import compile_graph

pytestmark = pytest.mark.timeout(300)
JOBS = pytest.mark.parametrize(
    ("backend", "num_ranks"), [on("host", 3, slow=True), *(on("cuda", num, num_ranks=num) for num in (2, 4))]
)
WORKERS = {"host": 1, "cuda": 8}
CONFIG = tiny_config(hidden_size=384, intermediate_size=512, head_dim=64, vocab_size=1000, max_position=MAX_POSITION)


@dataclass
class Job:
    """A generate on `num_ranks` ranks that goes on for minutes, and what shorter ones print."""

    runner: Runner
    config: Path
    backend: str
    num_ranks: int
    healthy: dict[tuple[str, int], str]  # the output of an undisturbed run, by backend and number of ranks

    def command(self, *more: str, tokens: int = 150_000) -> list[str]:
        options = ("--backend", self.backend, "--workers", str(WORKERS[self.backend]), "--max-num-seqs", "2")
        return generate_command(self.config, *options, *more, tokens=tokens)

    def start(self, launcher: Launcher | None = None) -> subprocess.Popen[str]:
        return self.runner.start((launcher or with_ranks(self.num_ranks))(self.command()), environment())

    def finish_soon(self, process: subprocess.Popen[str]) -> Finished:
        started = time.monotonic()
        done = self.runner.finish(process)
        assert time.monotonic() - started < GONE_S, done.stderr
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
        return done

    def check_usable(self) -> None:
        """Fail unless as many new ranks generate the same tokens as before."""
        done = self.runner.run(with_ranks(self.num_ranks)(self.command(tokens=32)), environment())
        assert done.status == 0 and len(done.stdout.split()) == 32, (done.status, done.stderr)
        assert done.stdout == self.healthy.setdefault((self.backend, self.num_ranks), done.stdout), done.stderr

    def lose_a_signal(self, consumer: str, env: dict[str, str]) -> None:
        """Fail unless a run that loses a signal that `consumer` waits for ends with a line that says so."""
        source, target = (0, 1) if consumer == "iteration barrier" else (1, 0)
        hosts = virtual_hosts(env, self.num_ranks)
        sizes: dict[str, Any] = {"max_seqs": 2, "max_model_len": 4116, "host_sizes": hosts}
        options = DecodeOptions(self.num_ranks, WORKERS[self.backend], **sizes, **backend_choices(self.backend))
        program = compile_graph(*lower_programs(build_model(CONFIG), options))
        event, waiter = event_between(program, source, target, consumer)
        fault = {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},7"}
        start = with_ranks(self.num_ranks)(self.command("--deadline", "2", tokens=4100))
        done = self.runner.run(start, env | fault)
        assert "Exception ignored" not in done.stderr, done.stderr
        check_hang(done, target, event, waiter)
        self.runner.check_nothing_left()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(CONFIG, tmp_path / "config.json")


@pytest.fixture(scope="module")
def healthy() -> dict[tuple[str, int], str]:
    return {}


@pytest.fixture
def job(runner: Runner, config: Path, backend: str, num_ranks: int, healthy: dict[tuple[str, int], str]) -> Job:
    require(backend, num_ranks)
    return Job(runner, config, backend, num_ranks, healthy)


@JOBS
def test_usable(job: Job) -> None:
    """First of all: two undisturbed runs print the same, with which later ones are compared."""
    job.check_usable()
    job.check_usable()


@JOBS
def test_killed_rank(job: Job) -> None:
    process = job.start()
    wait_for_tokens(process)
    os.kill(pid_of(job.runner, 1), signal.SIGKILL)
    done = job.finish_soon(process)
    assert done.status == 4 and len(errors(done)) == 1, (done.status, done.stderr)
    assert re.match(r"distmk: rank 1\b", errors(done)[0]), done.stderr
    job.runner.check_nothing_left()
    job.check_usable()


@JOBS
def test_killed_rank_0(job: Job) -> None:
    process = job.start()
    wait_for_tokens(process)
    process.kill()
    job.runner.finish(process)
    job.runner.check_nothing_left(GONE_S)
    job.check_usable()


@JOBS
def test_killed_rank_under_mpirun(job: Job) -> None:
    """mpirun ends the other ranks; neither processes nor GPUs stay occupied."""
    process = job.start(under_mpirun(job.num_ranks))
    started = pid_of(job.runner, 1)
    wait_until_running(started, job.backend)
    os.kill(started, signal.SIGKILL)
    done = job.finish_soon(process)
    assert done.status != 0
    job.runner.check_nothing_left()
    job.check_usable()


def wait_until_running(pid: int, backend: str) -> None:
    """Wait until the process has loaded the runtime: mpirun holds back lines that have not ended, so no token shows."""
    library, deadline = "nvshmem" if backend == "cuda" else "/host-", time.monotonic() + 60
    while library not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline, f"{library} was not loaded"
        time.sleep(0.05)
    time.sleep(4 if backend == "cuda" else 1.5)


@JOBS
@pytest.mark.parametrize("consumer", ["layer0.o.reduce", "iteration barrier"])
def test_signal_that_never_comes(job: Job, consumer: str) -> None:
    job.lose_a_signal(consumer, environment())
    job.check_usable()


@pytest.mark.gpu
def test_a_far_rank_hears_of_a_hang(runner: Runner, config: Path) -> None:
    """Over the network, as if it were on another host."""
    require("cuda")
    Job(runner, config, "cuda", 2, {}).lose_a_signal("iteration barrier", sharing(2, **FAR))


@JOBS
def test_interrupted(job: Job) -> None:
    process = job.start()
    wait_for_tokens(process)
    os.killpg(process.pid, signal.SIGINT)
    done = job.finish_soon(process)
    assert done.status == 130 and errors(done) == ["distmk: interrupted"], (done.status, done.stderr)
    job.runner.check_nothing_left()
    job.check_usable()
