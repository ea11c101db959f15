"""`scripts/bench.py hops`: runs on the host twin, hops from the rows of a trace, and messages for mistakes."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from benchmark.hops import NUM_COLS, chain, hops_of, measure_power, text_of
from support.helpers import ROOT, Finished, Runner, under_mpirun

from distmk import Session, connect
from distmk.abi import LaunchKind
from distmk.tasks import Affine, Put
from distmk.trace.record import NEVER, ROW, UNKNOWN, Trace

NUM_ITERATIONS = 40
LEAST_US = -5.0  # of a hop: a sender may be interrupted between its signal and the record of its end


def bench(runner: Runner, *arguments: str, num_ranks: int = 1) -> Finished:
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "hops", "--backend", "host", *arguments]
    return runner.run(under_mpirun(num_ranks)(command) if num_ranks > 1 else command)


def expected(num_ranks: int, num_workers: int, listed_only: bool) -> dict[str, tuple[int, int]]:
    """By kind of hop, in the order of the table: tasks in an iteration, and how many of them may wait for another's end."""
    others = num_workers - 1
    of_a_rank = {"one to all": (num_workers, others), "all to one": (1, min(1, others))}
    if not listed_only:
        of_a_rank |= {"just in time": (1, 1), "just in time, massive": (1, 1)}
    of_a_rank["spread"] = (num_workers, num_workers if others else 0)
    if num_ranks > 1:
        of_a_rank["to another rank"] = (1, 1)
    return {op: (num_ranks * num_tasks, num_ranks * most) for op, (num_tasks, most) in of_a_rank.items()}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "listed_only"), [(1, 3, False), (1, 3, True), (2, 2, False), (3, 1, False)]
)
def test_one_run(num_ranks: int, num_workers: int, listed_only: bool, runner: Runner) -> None:
    """All kinds of hops, over all tasks of the iterations asked for; the file agrees with the table."""
    sizes = ("--workers", str(num_workers), "--iterations", str(NUM_ITERATIONS), "--json", "found.json", "--power")
    done = bench(runner, *sizes, *["--listed-only"] * listed_only, num_ranks=num_ranks)
    assert done.status == 0, done.stderr[-3000:]
    found = json.loads((runner.folder / "found.json").read_text())
    size = [found[name] for name in ("backend", "num_ranks", "num_workers", "num_iterations")]
    assert size == ["host", num_ranks, num_workers, NUM_ITERATIONS]
    assert {"cpu", "cores", "python", "commit"} <= found["machine"].keys()
    assert "board" not in done.stdout and "watts" not in str(found.keys()), "the host twin has none"
    want = expected(num_ranks, num_workers, listed_only)
    assert [hop["hop"] for hop in found["hops"]] == list(want)
    for hop in found["hops"]:
        num_tasks, most = (NUM_ITERATIONS * each for each in want[hop["hop"]])
        assert hop["num_tasks"] == num_tasks and min(1, most) <= hop["count"] <= most, hop
        if most:
            assert LEAST_US < hop["median_us"] <= hop["p99_us"] < 1e6, hop
    assert done.stdout == text_of(found) + "\n"
    assert ("clocks" in done.stdout) == (num_ranks > 1)


@pytest.mark.parametrize(("num_workers", "listed_only"), [(1, False), (2, False), (3, True)])
def test_an_iteration_adds_one(num_workers: int, listed_only: bool) -> None:
    """Every step takes the output of the one before, so that an iteration adds 1 to every element."""
    with connect() as bootstrap, Session(chain(1, num_workers, listed_only), bootstrap, backend="host") as session:
        session.run(7)
        assert (session.view("ended") == 7).all() and (session.view("gathered") == 7).all()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_rank_after_rank(num_ranks: int) -> None:
    """Each rank adds 1 to the result of the rank before, and the first goes on with that of the last."""
    graph, num_iterations = chain(num_ranks, 3), 4
    held = defaultdict(lambda: np.zeros(3 * NUM_COLS))
    for task in num_iterations * graph.tasks:
        assert isinstance(task, Affine | Put)
        (src, at, begin, end), (dst, to, first, last) = task.src, task.dst
        held[dst, to][first:last] = held[src, at][begin:end] + getattr(task, "shift", 0.0)
    for (buffer, rank), values in held.items():
        if buffer.name == "ended":
            assert (values[:NUM_COLS] == num_ranks * (num_iterations - 1) + rank + 1).all(), rank


def test_how_tasks_reach_their_workers() -> None:
    found = {(task.op, task.worker): task.launch for task in chain(2, 3).tasks if task.rank == 1}
    assert {launch: op for (op, _), launch in found.items() if launch is not LaunchKind.AHEAD} == {
        LaunchKind.SINGLE: "just in time",
        LaunchKind.MASSIVE: "just in time, massive",
        LaunchKind.SPREAD: "spread",
    }
    assert [worker for op, worker in found if op == "one to all"] == [0, 1, 2]
    assert [worker for op, worker in found if op in ("to another rank", "all to one")] == [2, 2]


def trace_of(rows: Sequence[tuple[str, int, LaunchKind, int, int, int]]) -> Trace:
    """A trace of two workers from rows of (operator, runner, launch, start, end of the task waited for, idle time), in ns."""
    ops = list(dict.fromkeys(op for op, *_ in rows))
    made = np.zeros(len(rows), ROW)
    made["op"] = [ops.index(op) for op, *_ in rows]
    for at, name in enumerate(("runner", "launch", "start_ns", "ready_ns", "idle_ns"), 1):
        made[name] = [row[at] for row in rows]
    return Trace(made, ops, [], 2, [0], [0])


def test_hops_of_rows() -> None:
    """A worker that was busy until later, or has no record of an end, did not wait; a dispatched task may follow its own."""
    ahead, single, massive, spread = LaunchKind.AHEAD, LaunchKind.SINGLE, LaunchKind.MASSIVE, LaunchKind.SPREAD
    rows = [("one to all", 1, ahead, 5000 + 10 * step, 5000, 4000) for step in range(1, 102)]
    rows += [("one to all", 0, ahead, 9000, 5000, 3000), ("one to all", 0, ahead, 9000, 5000, 4000)]
    rows += [("one to all", 0, ahead, 9000, ready_ns, 3000) for ready_ns in (NEVER, UNKNOWN)]
    rows += [("all to one", 1, ahead, 990, 1000, 500), ("all to one", 1, ahead, 1010, 1000, 0)]
    rows += [("just in time, massive", 0, massive, 1300, 1000, 300), ("just in time", 1, single, 1250, 1000, 800)]
    rows += [("just in time", 2, single, 1100, 1000, 800), ("spread", 0, spread, 1300, 1000, 300)]
    rows += [("begin", 1, ahead, 1300, 1000, 500), ("put", 0, ahead, 1300, 1000, 500)]
    found = [tuple(hop.values()) for hop in hops_of(trace_of(rows))]
    assert found == [
        ("one to all", 101, 105, pytest.approx(0.51), pytest.approx(1.0)),
        ("all to one", 1, 2, pytest.approx(-0.01), pytest.approx(-0.01)),
        ("just in time", 1, 1, pytest.approx(0.25), pytest.approx(0.25)),
        ("just in time, massive", 1, 1, pytest.approx(0.3), pytest.approx(0.3)),
        ("spread", 0, 1, None, None),
    ]
    assert list(hops_of(trace_of(rows))[0]) == ["hop", "count", "num_tasks", "median_us", "p99_us"]


def test_table() -> None:
    hops: list[dict[str, Any]] = [
        {"hop": "one to all", "count": 101, "num_tasks": 105, "median_us": 0.512, "p99_us": 1.25},
        {"hop": "spread", "count": 0, "num_tasks": 7, "median_us": None, "p99_us": None},
    ]
    found = {"backend": "cuda", "num_ranks": 2, "num_workers": 132, "num_iterations": 9, "hops": hops}
    found |= {"machine": {"gpu": "NVIDIA X", "driver": "1.2"}, "clock_uncertainty_us": 0.75}
    found |= {"idle_watts": 71.23, "waiting_watts": 140.0}
    assert [" ".join(line.split()) for line in text_of(found).splitlines()] == [
        "gpu NVIDIA X, driver 1.2",
        "ranks' clocks are told apart to within 0.75 us",
        "rank 0's board: 71.2 W idle, 140.0 W while all workers but one wait",
        "cuda, 2 ranks x 132 workers, 9 iterations",
        "hop count of tasks median us p99 us",
        "one to all 101 105 0.51 1.25",
        "spread 0 7 - -",
    ]
    assert "its power cannot be read" in text_of(found | {"idle_watts": None, "waiting_watts": None})


def test_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """First nothing runs, then one launch, each for as long as asked."""
    seconds: list[float] = []

    class Meter:
        def watts(self, run: Callable[[], None]) -> float:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            return float(len(seconds))

    monkeypatch.setattr("benchmark.machine.power_meter", lambda backend, gpu: Meter())
    monkeypatch.setattr("benchmark.hops.gpu_of", lambda local_rank: 0)
    monkeypatch.setattr("benchmark.hops.POWER_S", 0.3)
    monkeypatch.setattr("benchmark.hops.NUM_SINES", 20_000)  # ten take longer than a launch
    with connect() as bootstrap:
        assert measure_power(bootstrap, 2, "host") == {"idle_watts": 1.0, "waiting_watts": 2.0}
    assert 0.3 <= seconds[0] < 3 and 0.001 < seconds[1] < 10, seconds


@pytest.mark.parametrize(
    ("arguments", "said", "num_ranks"),
    [
        (("--iterations", "0"), "--iterations is 0; it must be at least 1", 1),
        (("--workers", "0"), "--workers is 0; it must be at least 1", 2),
        (("--json", "/nowhere/found.json"), "no folder /nowhere", 1),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str, num_ranks: int, runner: Runner) -> None:
    """One line."""
    done = bench(runner, *arguments, num_ranks=num_ranks)
    lines = [line for line in done.stderr.splitlines() if line.startswith("distmk: ")]
    assert (done.status, done.stdout, len(lines)) == (2, "", 1), done
    assert said in lines[0] and "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written(runner: Runner) -> None:
    """The measurements are printed all the same."""
    done = bench(runner, "--iterations", "1", "--workers", "1", "--json", ".")
    assert (done.status, done.stderr) == (2, "distmk: . cannot be written: Is a directory\n")
    assert "just in time, massive" in done.stdout
