"""A run cut into launches of a few iterations each gives the same results as one launch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import GONE_S, assert_runs, check_hang, endless_event, errors, pid_of, wait_for_tokens
from support.graph_runs import assert_done, run_job
from support.helpers import Runner, with_ranks

pytestmark = pytest.mark.timeout(120)

CUT = {"DISTMK_LAUNCH_ITERATIONS": "1"}


SCHEDULERS = pytest.mark.parametrize(
    "threads", [pytest.param(False, id="riding"), pytest.param(True, id="threads", marks=pytest.mark.slow)]
)


@pytest.mark.drawn(1)
@pytest.mark.whole
@SCHEDULERS
@pytest.mark.parametrize(
    ("ranks", "workers", "schedulers"),
    [(1, 1, 1), (1, 3, 2), (2, 1, 1), (2, 2, 2), pytest.param(3, 1, 1, marks=pytest.mark.slow)],
)
def test_decode_to_the_bit(tmp_path: Path, ranks: int, workers: int, schedulers: int, threads: bool) -> None:
    assert_done(run_job(tmp_path, "cut_launches", ranks, workers=workers, schedulers=schedulers, threads=threads))


GRAPHS: list[tuple[str, int, dict[str, Any]]] = [
    ("queues", 2, {"workers": 3, "iterations": 20}),
    ("all_reduce", 3, {"workers": 1, "iterations": 25}),
    ("pipeline", 4, {"iterations": 20}),
    ("handed_out", 1, {"workers": 5, "schedulers": 2, "instances": 600, "iterations": 9}),
    ("handed_out", 2, {"workers": 3, "schedulers": 3, "instances": 7, "iterations": 25}),
    ("traced", 2, {"workers": 3, "schedulers": 2, "instances": 7, "iterations": 25, "kept": 5}),
]


@pytest.mark.drawn(2)
@pytest.mark.whole
@SCHEDULERS
@pytest.mark.parametrize(
    ("length", "scenario", "ranks", "options"),
    [(length, *graph) for length in ("1", "7") for graph in GRAPHS if length == "1" or graph[0] == "handed_out"],
)
def test_graphs(tmp_path: Path, scenario: str, ranks: int, options: dict[str, Any], length: str, threads: bool) -> None:
    env = {"DISTMK_LAUNCH_ITERATIONS": length}
    assert_done(run_job(tmp_path, scenario, ranks, env, threads=threads, **options))


@pytest.mark.slow
def test_far_ranks(tmp_path: Path) -> None:
    env = CUT | {"DISTMK_FAULT_DELAY_PUTS": "500,2,3"}
    assert_done(run_job(tmp_path, "all_reduce", 4, env, workers=1, iterations=20))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("num_ranks", "source", "target", "consumer"),
    [
        (2, 1, 0, "layer0.o.reduce"),
        (3, 0, 2, "layer1.down.reduce"),
        (2, 1, 0, "scheduler_step"),
        (2, 0, 1, "iteration barrier"),
    ],
)
def test_signal_that_never_comes(
    runner: Runner, command: Callable[..., list[str]], num_ranks: int, source: int, target: int, consumer: str
) -> None:
    event, waiter = endless_event(num_ranks, source, target, consumer)
    fault = CUT | {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},7"}
    done = runner.run(with_ranks(num_ranks)(command("--deadline", "2", tokens=4100)), fault)
    check_hang(done, target, event, waiter)
    runner.check_nothing_left()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_interrupted(runner: Runner, command: Callable[..., list[str]], num_ranks: int) -> None:
    process = runner.start(with_ranks(num_ranks)(command()), CUT)
    wait_for_tokens(process)
    os.killpg(process.pid, signal.SIGINT)
    done = runner.finish(process)
    assert done.status == 130 and errors(done) == ["distmk: interrupted"], (done.status, done.stderr)
    runner.check_nothing_left()


def test_killed_rank(runner: Runner, command: Callable[..., list[str]]) -> None:
    process = runner.start(with_ranks(3)(command()), CUT)
    wait_for_tokens(process)
    os.kill(pid_of(runner, 1), signal.SIGKILL)
    started = time.monotonic()
    done = runner.finish(process)
    assert time.monotonic() - started < GONE_S
    assert done.status == 4 and len(errors(done)) == 1, done.stderr
    assert errors(done)[0].startswith("distmk: rank 1 "), done.stderr
    runner.check_nothing_left()
    assert_runs(runner, command)
