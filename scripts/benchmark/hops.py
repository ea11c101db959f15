"""The runtime's own latencies: from the end of the last task that a task waits for to its start, by kind of hop.

One graph of small vectors, a chain of steps, is run many times in one launch. The times come from its trace, and only
count where a worker was idle when its wait ended. A task's end is noted after its triggers are sent, so a hop can be a
little below zero. With several ranks, one rank after another runs the steps and puts the result to the next.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmark import machine
from distmk import Graph, Session
from distmk.abi import LaunchKind
from distmk.backends.cuda.gpus import gpu_of
from distmk.backends.defaults import BACKENDS, choose_backend, choose_workers
from distmk.bootstrap import Bootstrap, agree, connect
from distmk.errors import UsageError
from distmk.tasks import Affine, Put, Sine
from distmk.trace import Trace
from distmk.trace.summary import Spread
from distmk.trace.table import table, us

# Operators whose tasks' waits are timed, under the names that the table shows.
TO_ALL, TO_ONE, SPREAD, TO_RANK = "one to all", "all to one", "spread", "to another rank"
HANDED_OUT = {LaunchKind.SINGLE: "just in time", LaunchKind.MASSIVE: "just in time, massive"}
HOPS = (TO_ALL, TO_ONE, *HANDED_OUT.values(), SPREAD, TO_RANK)
HEAD = ("hop", "count", "of tasks", "median us", "p99 us")

NUM_COLS = 16  # columns of a vector
NUM_WARM_UP = 100  # iterations that are not timed
POWER_S = 2.0  # duration of each mean
NUM_SINES = 100_000  # one after another: about ten milliseconds on a GPU
NUM_GUESSED = 10  # iterations from which the number that takes POWER_S is estimated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="of a rank (default: one an SM, or a share of the cores)"
    )
    iterations = f"to time, behind {NUM_WARM_UP} others (default 200)"
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help=iterations)
    listed = "hand out nothing, so that a GPU's workers look ahead as in a decode step"
    parser.add_argument("--listed-only", action="store_true", help=listed)
    parser.add_argument("--power", action="store_true", help="also of rank 0's board, idle and while workers wait")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same here")


def run(arguments: argparse.Namespace) -> int:
    with connect() as bootstrap:
        backend, num_workers = agree(bootstrap, lambda: _check(arguments, bootstrap))
        graph = chain(bootstrap.world_size, num_workers, arguments.listed_only)
        with Session(graph, bootstrap, backend=backend) as session:
            trace = session.run_traced(NUM_WARM_UP + arguments.iterations, arguments.iterations)
        power = measure_power(bootstrap, num_workers, backend) if arguments.power and backend == "cuda" else {}

        def tell() -> None:
            if trace is not None:
                report = found_in(trace, backend) | power
                print(text_of(report), flush=True)
                if arguments.json:
                    _write(report, arguments.json)

        agree(bootstrap, tell)
    return 0


def _check(arguments: argparse.Namespace, bootstrap: Bootstrap) -> tuple[str, int]:
    """The backend, and the number of workers of a rank."""
    for name in ("iterations", "workers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")
    if arguments.json and not (folder := arguments.json.absolute().parent).is_dir():
        raise UsageError(f"{arguments.json}: no folder {folder}; make it first")
    backend = choose_backend(arguments.backend)
    return backend, choose_workers(arguments.workers, backend, bootstrap)


def chain(num_ranks: int, num_workers: int, listed_only: bool = False) -> Graph:
    """All hops in a chain, on one rank after another. Each rank adds 1 to its input.

    The last worker runs `TO_ONE` and also the task before `TO_ALL`, so its own part is the first to end, and it waits
    for another worker's part. Dispatched tasks go to workers 0 and 1, not to the workers that they wait for.
    """
    graph, last = Graph(num_ranks, num_workers), num_workers - 1
    arrived, returned, one, ended = (graph.buffer(name, NUM_COLS) for name in ("arrived", "returned", "one", "ended"))
    parts, gathered = (graph.buffer(name, NUM_COLS * num_workers) for name in ("parts", "gathered"))
    results = {launch: graph.buffer(op, NUM_COLS) for launch, op in HANDED_OUT.items()}
    for rank in range(num_ranks):
        op, given = ("begin", ended) if num_ranks == 1 else (TO_RANK, arrived if rank else returned)
        graph.add(Affine(rank, op, worker=last, src=given.at(rank), dst=one.at(rank), shift=1.0))
        for worker in range(num_workers):
            part = parts.at(rank, NUM_COLS * worker, NUM_COLS * (worker + 1))
            graph.add(Affine(rank, TO_ALL, worker=worker, src=one.at(rank), dst=part))
        graph.add(Affine(rank, TO_ONE, worker=last, src=parts.at(rank), dst=gathered.at(rank)))
        src = gathered.at(rank, 0, NUM_COLS)
        for launch, op in () if listed_only else HANDED_OUT.items():
            dst = results[launch].at(rank)
            graph.add(Affine(rank, op, launch=launch, src=src, dst=dst))
            src = dst
        graph.add(Affine(rank, SPREAD, launch=LaunchKind.SPREAD, src=src, dst=ended.at(rank)))
        if rank + 1 < num_ranks:
            graph.add(Put(rank, "put", worker=0, src=ended.at(rank), dst=arrived.at(rank + 1)))
    # Back from rank to rank, not at once: a hop in each direction gives the best estimate of two clocks' offset.
    for rank in reversed(range(1, num_ranks)):
        src = (returned if rank + 1 < num_ranks else ended).at(rank)
        graph.add(Put(rank, "put back", worker=0, src=src, dst=returned.at(rank - 1)))
    return graph


def hops_of(trace: Trace) -> list[dict[str, Any]]:
    """For every kind of hop in the graph: how many tasks waited, of how many, and times in us; None if no task waited."""
    rows, waited, reported = trace.rows, trace.waited(), []
    for op in (op for op in HOPS if op in trace.ops):
        mine = rows["op"] == trace.ops.index(op)
        num_tasks = int((mine & (rows["runner"] < trace.num_workers)).sum())
        hops = Spread.of((rows["start_ns"] - rows["ready_ns"])[mine & waited])
        median_us, p99_us = (hops.p50_us, hops.p99_us) if hops.count else (None, None)
        reported.append(dict(hop=op, count=hops.count, num_tasks=num_tasks, median_us=median_us, p99_us=p99_us))
    return reported


def found_in(trace: Trace, backend: str) -> dict[str, Any]:
    """The results of the trace, and the hardware and software of the run."""
    hardware = machine.gpu(gpu_of(0)) if backend == "cuda" else machine.cpu()
    return {
        "backend": backend,
        "num_ranks": trace.num_ranks,
        "num_workers": trace.num_workers,
        "num_iterations": len(np.unique(trace.rows["iteration"])),
        "hops": hops_of(trace),
        "clock_uncertainty_us": max(trace.uncertainty_ns) / 1e3,
        "machine": hardware | machine.versions("torch", "nvshmem4py-cu13"),
    }


def text_of(report: dict[str, Any]) -> str:
    """The results as text."""
    lines = [", ".join(f"{name} {value}" for name, value in report["machine"].items())]
    if report["num_ranks"] > 1:
        lines.append(f"ranks' clocks are told apart to within {us(report['clock_uncertainty_us'])} us")
    if "idle_watts" in report:
        idle, waiting = report["idle_watts"], report["waiting_watts"]
        known = f"{idle:.1f} W idle, {waiting:.1f} W while all workers but one wait" if idle and waiting else ""
        lines.append(f"rank 0's board: {known or 'its power cannot be read; pip install nvidia-ml-py'}")
    size = f"{report['num_ranks']} ranks x {report['num_workers']} workers, {report['num_iterations']} iterations"
    cells = []
    for hop in report["hops"]:
        times = ["-" if hop[name] is None else us(hop[name]) for name in ("median_us", "p99_us")]
        cells.append([hop["hop"], str(hop["count"]), str(hop["num_tasks"]), *times])
    return "\n".join([*lines, table(f"{report['backend']}, {size}", HEAD, cells).rstrip()])


def measure_power(bootstrap: Bootstrap, num_workers: int, backend: str) -> dict[str, float | None]:
    """Mean watts of this rank's board with everything loaded: without a launch, and in a launch in which one worker
    works and all others wait for it.

    None if they cannot be measured. Collective.
    """
    graph = Graph(bootstrap.world_size, num_workers)
    slow, parts = graph.buffer("slow", NUM_COLS), graph.buffer("parts", NUM_COLS * num_workers)
    for rank in range(graph.num_ranks):
        graph.add(Sine(rank, "slow", worker=0, src=slow.at(rank), dst=slow.at(rank), times=NUM_SINES))
        for worker in range(1, num_workers):
            part = parts.at(rank, NUM_COLS * worker, NUM_COLS * (worker + 1))
            graph.add(Affine(rank, TO_ALL, worker=worker, src=slow.at(rank), dst=part))
    meter = machine.power_meter(backend, gpu_of(bootstrap.local_rank))
    with Session(graph, bootstrap, backend=backend) as session:

        def run(num_iterations: int) -> None:
            session.run(num_iterations)

        run(1)
        began = time.perf_counter()
        run(NUM_GUESSED)
        guess = max(1, round(NUM_GUESSED * POWER_S / (time.perf_counter() - began)))
        num_iterations = int(bootstrap.broadcast(str(guess).encode()))  # rank 0's number
        idle = meter.watts(lambda: time.sleep(POWER_S))
        return {"idle_watts": idle, "waiting_watts": meter.watts(lambda: run(num_iterations))}


def _write(report: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
