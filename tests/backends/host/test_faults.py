"""Ranks that die, signals that never come, and interrupts: every rank leaves soon and says why."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import (
    GONE_S,
    assert_runs,
    check_hang,
    endless_event,
    errors,
    pid_of,
    wait_for_tokens,
)
from support.helpers import DISTMK, Launcher, Runner, under_mpirun, with_ranks

pytestmark = pytest.mark.timeout(120)


def wait_for_launch(runner: Runner, rank: int) -> None:
    """Wait until the rank's process has loaded the runtime: mpirun holds back lines that have not ended, so no token shows."""
    pid, deadline = pid_of(runner, rank), time.monotonic() + 30
    while time.monotonic() < deadline:
        if "/host-" in Path(f"/proc/{pid}/maps").read_text():
            time.sleep(1.5)
            return
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not load the runtime")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_ranks", "lost"), [(2, 1), (3, 2)])
def test_killed_rank(runner: Runner, command: Callable[..., list[str]], num_ranks: int, lost: int) -> None:
    process = runner.start(with_ranks(num_ranks)(command()))
    wait_for_tokens(process)
    os.kill(pid_of(runner, lost), signal.SIGKILL)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status == 4 and "Traceback" not in done.stderr, done.stderr
    assert len(errors(done)) == 1 and re.match(rf"distmk: rank {lost}\b", errors(done)[0]), (
        done.stderr
    )  # rank 0 says it
    runner.check_nothing_left()
    assert_runs(runner, command)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_killed_rank_0(runner: Runner, command: Callable[..., list[str]], num_ranks: int) -> None:
    process = runner.start(with_ranks(num_ranks)(command()))
    wait_for_tokens(process)
    process.kill()
    runner.finish(process)
    runner.check_nothing_left(GONE_S)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_rank_under_mpirun(runner: Runner, command: Callable[..., list[str]], lost: int) -> None:
    process = runner.start(under_mpirun(2)(command()))
    wait_for_launch(runner, 1)
    os.kill(pid_of(runner, lost), signal.SIGKILL)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status != 0
    runner.check_nothing_left()


@pytest.mark.parametrize("after_s", [0.1, 0.8, 1.6])
def test_killed_while_starting(runner: Runner, smollm2: Path, after_s: float) -> None:
    """A rank that dies while Python starts, while ranks join, or while weights are read."""
    options = ("--prompt", "x", "--max-new-tokens", "4000", "--ignore-eos", "--ranks", "3")
    process = runner.start([*DISTMK, "generate", "--model", str(smollm2), *options])
    pid = pid_of(runner, 2)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status == 4 and "Traceback" not in done.stderr, done.stderr
    assert any(line.startswith("distmk: rank 2 ") for line in errors(done)), done.stderr
    runner.check_nothing_left()


# Signals that never come


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "source", "target", "consumer"),
    [
        (with_ranks, 2, 1, 0, "layer0.o.reduce"),
        (with_ranks, 3, 0, 2, "layer1.down.reduce"),
        (with_ranks, 2, 1, 0, "scheduler_step"),
        (with_ranks, 2, 0, 1, "iteration barrier"),
        (under_mpirun, 2, 0, 1, "layer1.down.reduce"),
    ],
)
def test_signal_that_never_comes(
    runner: Runner,
    command: Callable[..., list[str]],
    launcher: Callable[[int], Launcher],
    num_ranks: int,
    source: int,
    target: int,
    consumer: str,
) -> None:
    event, waiter = endless_event(num_ranks, source, target, consumer)
    fault = {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},7"}
    done = runner.run(launcher(num_ranks)(command("--deadline", "2", tokens=4100)), fault)
    check_hang(done, target, event, waiter)
    runner.check_nothing_left()


def test_stopped_for_longer_than_the_deadline(runner: Runner, command: Callable[..., list[str]]) -> None:
    """By Ctrl-Z, a debugger, or a machine that sleeps: no rank has waited for that long itself, so all go on."""
    process = runner.start(with_ranks(2)(command("--deadline", "1")))
    wait_for_launch(runner, 1)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.3)
    ended = process.poll()
    os.killpg(process.pid, signal.SIGINT)
    done = runner.finish(process)
    assert (ended, done.status) == (None, 130) and errors(done) == ["distmk: interrupted"], done.stderr
    runner.check_nothing_left()


# Interruptions


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_ranks", "how"), [(1, "rank 0"), (3, "group"), (3, "terminate")])
def test_interrupted(runner: Runner, command: Callable[..., list[str]], num_ranks: int, how: str) -> None:
    process = runner.start(with_ranks(num_ranks)(command()))
    wait_for_tokens(process)
    if how == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT if how == "rank 0" else signal.SIGTERM)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status == 130 and errors(done) == ["distmk: interrupted"], (done.status, done.stderr)
    assert "Traceback" not in done.stderr
    runner.check_nothing_left()


def test_interrupted_under_mpirun(runner: Runner, command: Callable[..., list[str]]) -> None:
    process = runner.start(under_mpirun(2)(command()))
    wait_for_launch(runner, 1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status != 0 and "Traceback" not in done.stderr, done.stderr
    runner.check_nothing_left()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
def test_interrupted_while_starting(runner: Runner, smollm2: Path, after_s: float) -> None:
    options = ("--prompt", "Once", "--max-new-tokens", "4000", "--ignore-eos", "--ranks", "2")
    process = runner.start([*DISTMK, "generate", "--model", str(smollm2), *options])
    pid_of(runner, 1)  # from here on distmk handles Ctrl-C, not the Python interpreter
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status == 130 and "Traceback" not in done.stderr, (done.status, done.stderr)
    assert errors(done) == ["distmk: interrupted"], done.stderr
    runner.check_nothing_left()
