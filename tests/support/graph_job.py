"""The job of graph_runs.run_job: every rank builds a scenario's graph, runs it, and compares its memory with numpy.

python tests/support/graph_job.py SCENARIO OPTIONS FOLDER     (OPTIONS: JSON; the rank's note is FOLDER/RANK)
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support import decode_scenarios, tensor_scenarios
from support.job import Job

import distmk
from distmk.abi import LaunchKind, Space
from distmk.backends.launch_spec import LaunchSpec
from distmk.errors import DistmkError
from distmk.tasks import Affine, Put, Sum

COLS = 24
AHEAD, SINGLE, MASSIVE, SPREAD = LaunchKind.AHEAD, LaunchKind.SINGLE, LaunchKind.MASSIVE, LaunchKind.SPREAD


@dataclasses.dataclass(frozen=True, eq=False)
class ManySum(Sum):
    """A sum with several instances a launch, all of the same work: with `accumulates`, each adds to dst."""

    instances: int = 1

    def max_instances(self) -> int:
        return self.instances


class AsDeclared(int):
    """Equal to every number."""

    def __ne__(self, other: object) -> bool:
        return False


# `check` takes the number of instances from the arguments; a Sum's do not have the number of a ManySum.
Sum.num_instances = classmethod(lambda cls, args: AsDeclared())  # type: ignore[assignment, method-assign]


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


def queues(job: Job) -> None:
    """x -> a x + b -> ... on one worker after another: any other order gives other numbers."""
    graph = job.graph()
    x = graph.buffer("x", COLS)
    steps = [(0.5, 3.0), (-1.0, 1.0), (2.0, -4.0), (0.25, 7.0)]
    for rank in range(job.num_ranks):
        for number, (scale, shift) in enumerate(steps * 2):
            graph.add(Affine(rank, f"step{number}", src=x.at(rank), dst=x.at(rank), scale=scale, shift=shift))
    with job.session(graph) as session:
        want = np.linspace(-8, 8, COLS, dtype=np.float32) + job.rank
        session.view(x)[0] = want
        for _ in range(3):  # several launches of a session
            job.run(session)
            for _ in range(job.iterations):
                for scale, shift in steps * 2:
                    want = want * np.float32(scale) + np.float32(shift)
            np.testing.assert_allclose(session.view(x)[0], want, rtol=1e-6)


def all_reduce(job: Job) -> None:
    graph = job.graph()
    vector, slots = graph.buffer("vector", COLS), graph.buffer("slots", job.num_ranks * COLS)
    for rank in range(job.num_ranks):
        for peer in range(job.num_ranks):
            slot = slots.at(peer, rank * COLS, (rank + 1) * COLS)
            graph.add(Put(rank=rank, op=f"put{peer}", src=vector.at(rank), dst=slot))
    for rank in range(job.num_ranks):
        blocks = tuple(slots.at(rank, i * COLS, (i + 1) * COLS) for i in range(job.num_ranks))
        graph.add(Sum(rank=rank, op="reduce", blocks=blocks, dst=vector.at(rank)))
        graph.add(Affine(rank, "shrink", src=vector.at(rank), dst=vector.at(rank), scale=0.5, shift=rank))
    with job.session(graph) as session:
        values = [np.random.default_rng(rank).standard_normal(COLS).astype(np.float32) for rank in range(job.num_ranks)]
        session.view("vector")[0] = values[job.rank]
        job.run(session)
        for _ in range(job.iterations):
            total = values[0].copy()
            for value in values[1:]:
                total += value
            values = [total * np.float32(0.5) + np.float32(rank) for rank in range(job.num_ranks)]
        np.testing.assert_allclose(session.view(vector)[0], values[job.rank], rtol=1e-5)


def pipeline(job: Job) -> None:
    """A stage a rank; the first may run ahead only by what its neighbour's buffer holds."""
    graph = job.graph()
    counter, last = graph.buffer("counter", 1), graph.buffer("last", 1)
    inputs = [graph.buffer(f"in{stage}", 1) for stage in range(job.num_ranks)]
    seen = graph.buffer("seen", 1)
    for stage, into in enumerate(inputs):
        if stage == 0:
            graph.add(Affine(0, "count", src=counter.at(0), dst=counter.at(0), shift=1.0))
            graph.add(Affine(0, "feed", src=counter.at(0), dst=into.at(0)))
        graph.add(Sum(stage, "tally", blocks=(into.at(stage),), dst=seen.at(stage), accumulates=True))
        if stage + 1 < job.num_ranks:
            graph.add(Put(stage, "pass", src=into.at(stage), dst=inputs[stage + 1].at(stage + 1)))
        else:
            graph.add(Affine(stage, "end", src=into.at(stage), dst=last.at(stage)))
    with job.session(graph) as session:
        job.run(session)
        # Each stage saw 1, 2, 3, ... once each: nothing was overwritten before it was read, nothing read twice.
        same(session.view(seen), [[job.iterations * (job.iterations + 1) / 2]])


def handed_out(job: Job) -> None:
    """Every kind of launch in turn, each with a counter of its own; `trail` depends on their order."""
    graph, kinds, instances = handed_out_graph(job), launch_kinds(job), job.options.get("instances", 5)
    with job.session(graph) as session:
        session.view("one")[:] = 1
        for _ in range(2):
            job.run(session)
        want = [job.total * (instances if kind is MASSIVE else 1) for kind in kinds]
        # Instances of one launch add to the same place at once: exact only where one worker runs them all.
        exact = [kind not in (MASSIVE, SPREAD) or job.workers == 1 for kind in kinds]
        same(session.view("counts")[0][exact], np.array(want)[exact])
        if job.rank == 0:
            same(session.view("trail")[0, 0], job.total * len(kinds) * job.num_ranks)


def launch_kinds(job: Job) -> list[LaunchKind]:
    return [AHEAD, SINGLE, MASSIVE, SPREAD, SPREAD, AHEAD] * job.options.get("tasks", 3)


def handed_out_graph(job: Job) -> distmk.Graph:
    graph, kinds, instances = job.graph(), launch_kinds(job), job.options.get("instances", 5)
    one = graph.buffer("one", 1)
    counts, trail = graph.buffer("counts", len(kinds)), graph.buffer("trail", len(kinds) + 1)
    for rank in range(job.num_ranks):
        for i, kind in enumerate(kinds):
            count = counts.at(rank, i, i + 1)
            times = {MASSIVE: instances, SPREAD: min(instances, job.workers)}.get(kind, 1)
            graph.add(
                ManySum(
                    rank, f"count{i}", launch=kind, blocks=(one.at(rank),), dst=count, accumulates=True, instances=times
                )
            )
            src, dst = trail.at(rank, i, i + 1), trail.at(rank, i + 1, i + 2)
            graph.add(Affine(rank, f"copy{i}", launch=kind, src=src, dst=dst, shift=1.0))
        # To the next rank, and at last back to the start of the trail.
        peer = (rank + 1) % job.num_ranks
        graph.add(Put(rank, "pass", src=trail.at(rank, len(kinds), len(kinds) + 1), dst=trail.at(peer, 0, 1)))
    return graph


def traced(job: Job) -> None:
    """The trace has every task of the last iterations once an instance, and counts the records dropped."""
    graph, kept = handed_out_graph(job), job.options["kept"]
    with job.session(graph) as session:
        trace = session.run_traced(job.iterations, kept)
        small = session.launch(LaunchSpec(num_iterations=job.iterations, trace_capacity=3))
        for _ in small:
            pass
        cut = small.trace()
        assert session.run(3) == 3  # and without a trace again
        assert (trace is None) == (cut is None) == (job.rank != 0)
        if trace is None or cut is None:
            return
        rows = trace.on_workers()
        want = [
            (order, iteration, instance)
            for part in session.program.ranks
            for order, kind, times in {(desc.order, desc.launch, desc.max_instances) for desc in part.tasks}
            for iteration in range(job.iterations - kept, job.iterations)
            # A spread task is recorded once a worker, however many instances the worker runs.
            for instance in range({MASSIVE: times, SPREAD: job.workers}.get(kind, 1))
        ]
        got = sorted(zip(*(rows[name].tolist() for name in ("order", "iteration", "instance")), strict=True))
        assert got == sorted(want), "every task of every iteration, once an instance"
        handed = sum(task.launch not in (AHEAD, SPREAD) for task in graph.tasks)
        once = sum(task.launch is SINGLE for task in graph.tasks)
        by_schedulers = kept * (once + (handed - once) * (job.options.get("schedulers") or job.workers))
        assert len(trace.rows) - len(rows) == by_schedulers
        assert trace.num_dropped == (len(trace.rows) // kept) * (job.iterations - kept), trace.num_dropped
        assert len(cut.rows) == 0 and cut.num_dropped == len(trace.rows) // kept * job.iterations


def wrong_ranks(job: Job) -> None:
    graph = job.graph()
    graph.add(Affine(0, "x", src=graph.buffer("a", 1).at(0), dst=graph.buffer("b", 1).at(0)))
    distmk.Session(graph, job.bootstrap)


def different_programs(job: Job) -> None:
    graph = job.graph()
    a, b = graph.buffer("a", 1), graph.buffer("b", 1)
    graph.add(Affine(0, "x", src=a.at(0), dst=b.at(0), shift=float(job.rank)))
    distmk.Session(graph, job.bootstrap)


def views(job: Job) -> None:
    graph = job.graph()
    a, b = graph.buffer("a", 3, rows=2), graph.buffer("b", 4, dtype="i32")
    c = graph.buffer("c", 4, dtype="bf16", space=Space.LOCAL)
    graph.add(Put(0, "x", src=b.at(0), dst=b.at(job.num_ranks - 1)))
    with job.session(graph) as session:
        assert session.view(a).shape == (2, 3) and session.view(b).dtype == np.int32
        assert session.view(c).dtype == np.uint16 and not session.view("c").any()
        job.bootstrap.barrier()
        stranger = distmk.Graph(1).buffer("stranger", 1)
        for unknown in ("nowhere", stranger):
            try:
                session.view(unknown)
            except distmk.UsageError as error:
                assert str(error).startswith("there is no buffer ")
            else:
                raise AssertionError(f"there is a view of {unknown}")


def main() -> int:
    scenario, options, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rank = os.environ.get("DISTMK_RANK", "0")
    try:
        with distmk.connect(options["ranks"], follower_argv=[sys.executable, *sys.argv]) as bootstrap:
            {**globals(), **vars(decode_scenarios), **vars(tensor_scenarios)}[scenario](Job(options, bootstrap))
    except DistmkError as error:
        (out / rank).write_text(f"{type(error).__name__}: {error}")
        return error.exit_code
    (out / rank).write_text("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
