"""A rank that is stopped, by SIGSTOP or a debugger, holds up neither an interrupt nor the end of a run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import errors, pid_of, wait_for_tokens
from support.helpers import DISTMK, Runner, with_ranks

pytestmark = pytest.mark.timeout(120)

INTERRUPTED_S = 10.0


def check_interrupted(runner: Runner, process: subprocess.Popen[str], lost: int, number: signal.Signals) -> None:
    """Stop a follower, interrupt rank 0, and fail unless all of the job ends in time and says one line."""
    pid = pid_of(runner, lost)
    stopped = f"distmk: rank {lost} (pid {pid}) is stopped"
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    process.send_signal(number)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < INTERRUPTED_S
    runner.check_nothing_left()
    if done.status == 4:  # rank 0 found the stopped rank before the signal came, as on a busy machine
        assert errors(done) == [stopped], done.stderr
        return
    assert done.status == 130 and "Traceback" not in done.stderr, (done.status, done.stderr)
    # Other followers may have time to name it.
    assert set(errors(done)[:-1]) <= {stopped} and errors(done)[-1] == "distmk: interrupted", done.stderr


@pytest.mark.parametrize(("num_ranks", "lost", "number"), [(2, 1, signal.SIGINT), (3, 2, signal.SIGTERM)])
def test_interrupted(
    runner: Runner, command: Callable[..., list[str]], num_ranks: int, lost: int, number: signal.Signals
) -> None:
    process = runner.start(with_ranks(num_ranks)(command()))
    wait_for_tokens(process)
    check_interrupted(runner, process, lost, number)


def test_interrupted_while_starting(runner: Runner, smollm2: Path) -> None:
    """Somewhere between the start of Python and the reading of weights."""
    options = ("--prompt", "Once", "--max-new-tokens", "4000", "--ignore-eos", "--ranks", "2")
    process = runner.start([*DISTMK, "generate", "--model", str(smollm2), *options])
    pid_of(runner, 1)  # from here on distmk handles Ctrl-C, not the Python interpreter
    time.sleep(random.uniform(0, 1.6))
    check_interrupted(runner, process, 1, signal.SIGINT)


def test_deadline(runner: Runner, command: Callable[..., list[str]]) -> None:
    """The deadline of a launch passes, and the others do not wait for the stopped rank's account of it."""
    process = runner.start(with_ranks(2)(command("--deadline", "1")))
    wait_for_tokens(process)
    os.kill(pid_of(runner, 1), signal.SIGSTOP)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < 1 + INTERRUPTED_S
    assert done.status == 4 and len(errors(done)) == 1, (done.status, done.stderr)
    assert re.fullmatch(r"distmk: rank 1 \(pid \d+\) is stopped", errors(done)[0]), done.stderr
    runner.check_nothing_left()
