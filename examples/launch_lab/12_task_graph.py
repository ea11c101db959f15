"""Rung 12: the chain as a task graph of distmk: one launch for many steps, and no barrier between kernels.

python examples/launch_lab/12_task_graph.py --elements 65536          (without a GPU: the host twin)
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np

import distmk
from distmk.backends.defaults import choose_workers
from distmk.graph.regions import Buffer
from distmk.tasks import Sine
from distmk.trace.record import NEVER, UNKNOWN
from lab.alone import main
from lab.results import ChainTime
from lab.stats import Spread
from lab.workload import NUM_KERNELS, NUM_SINES, check, expected, inputs

BUDGET_S = 0.15  # time of the longer of the two launches that are compared
MOST_STEPS, TRACED = 2000, 3
REPEATS = 7


def build(num: int, num_kernels: int, num_workers: int) -> tuple[distmk.Graph, Buffer]:
    """One task for each worker's part of each kernel.

    A part moves to the next worker after each kernel, so that tasks depend on other workers.
    """
    graph = distmk.Graph(1, num_workers)
    x = graph.buffer("x", num)
    bounds = np.linspace(0, num, num_workers + 1).astype(int).tolist()
    for kernel in range(num_kernels):
        for part, (begin, end) in enumerate(itertools.pairwise(bounds)):
            region, worker = x.at(0, begin, end), (part + kernel) % num_workers
            graph.add(Sine(rank=0, op=f"kernel{kernel}", worker=worker, src=region, dst=region, times=NUM_SINES))
    return graph, x


def measure(num: int, backend: str, num_workers: int | None = None, num_kernels: int = NUM_KERNELS) -> ChainTime:
    with distmk.connect() as bootstrap:
        began = time.perf_counter()
        graph, x = build(num, num_kernels, choose_workers(num_workers, backend, bootstrap))
        with distmk.Session(graph, bootstrap, backend=backend) as session:
            prepare_us = 1e6 * (time.perf_counter() - began)
            error = verify(session, x, num, num_kernels)
            per_step_us, start_us = time_steps(session)
            busy_us, gap_us = from_trace(session, num_kernels)
            error = max(error, verify(session, x, num, num_kernels))
    kernel_us = Spread.of(per_step_us).scaled(1 / num_kernels)
    return ChainTime("12", num, num_kernels, kernel_us, busy_us, gap_us, prepare_us, error, start_us)


def verify(session: distmk.Session, x: Buffer, num: int, num_kernels: int) -> float:
    """Run a step on fresh inputs; return the largest absolute error. LabError: a wrong result."""
    session.backend.write(session.program.placement.buffers[x], 0, inputs(num).reshape(1, -1))
    session.run(1)
    return check("rung 12", session.view(x)[0], expected(num, NUM_SINES * num_kernels))


def time_steps(session: distmk.Session) -> tuple[list[float], float]:
    """Time per step in us, in launches of many steps; and the cost of a launch in us.

    Both come from the difference between launches of one step and of many, because the host polls for the end of a launch
    only at intervals.
    """

    def run_us(num_steps: int) -> float:
        began = time.perf_counter()
        session.run(num_steps)
        return 1e6 * (time.perf_counter() - began)

    run_us(1)
    guess_us = max(run_us(11) - run_us(1), 1.0) / 10
    more = min(max(int(1e6 * BUDGET_S / guess_us), 5), MOST_STEPS)
    times = [(run_us(1), run_us(1 + more)) for _ in range(REPEATS)]
    one_us = statistics.median(one for one, _ in times)
    per_step_us = [(many - one_us) / more for _, many in times]
    return per_step_us, max(one_us - statistics.median(per_step_us), 0.0)


def from_trace(session: distmk.Session, num_kernels: int) -> tuple[float | None, float | None]:
    """Medians in us: from a kernel's first start to its last end, and from the last input of a task to its start.

    None: the backend recorded no trace, or no task waited.
    """
    trace = session.run_traced(20, TRACED)
    if trace is None or not len(trace.rows):
        return None, None
    rows, spans = trace.on_workers(), []
    for iteration in np.unique(rows["iteration"]):
        for op in range(len(trace.ops)):
            of_kernel = rows[(rows["iteration"] == iteration) & (rows["op"] == op)]
            if len(of_kernel):
                spans.append(int(of_kernel["end_ns"].max() - of_kernel["start_ns"].min()))
    known = (rows["ready_ns"] != UNKNOWN) & (rows["ready_ns"] != NEVER)
    hops = rows["start_ns"][known] - rows["ready_ns"][known]
    return statistics.median(spans) / 1e3, float(np.median(hops)) / 1e3 if len(hops) else None


if __name__ == "__main__":
    main(__file__)
