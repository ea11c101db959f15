"""Traces of simulated records, whose hops, clock offsets and idle times are known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support import graphs
from support.tiny_config import tiny_config

from distmk import trace
from distmk.abi import NO_EVENT, LaunchKind
from distmk.backends.launch_block import ENTRY, RunnerRecords
from distmk.bootstrap.single import SingleBootstrap
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import Program, compile_graph
from distmk.tasks import TASK_TYPES
from distmk.trace.collect import assemble
from distmk.trace.path import critical_path
from distmk.trace.record import NEVER, UNKNOWN, Trace, family_of, layer_of
from distmk.trace.summary import by_event, by_op, hops, idle_shares, iterations

FINISH_NS = 100
Task = tuple[int, int]  # rank, index


@dataclass
class Simulation:
    """Runs a program's tasks in program order, each as soon as its waits and its worker allow; one that may idle does."""

    program: Program
    num_iterations: int = 3
    body_ns: tuple[int, int] = (3000, 3000)  # least and most
    hop_ns: int = 500
    cross_ns: int = 2000
    ahead_ns: tuple[int, ...] = (0,) * 8
    seed: int = 0
    producers: dict[tuple[int, int], list[Task]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[tuple[Task, int], int] = field(default_factory=dict)
    ready: dict[tuple[int, int, int, int], int | None] = field(
        default_factory=dict
    )  # by rank, order, iteration, instance

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.program.ranks):
            for index, desc in enumerate(part.tasks):
                for trigger in part.triggers[desc.trigger_begin : desc.trigger_begin + desc.num_triggers]:
                    self.producers[trigger.rank, trigger.event].append((rank, index))
        self.random = random.Random(self.seed)

    def waits(self, rank: int, index: int, iteration: int) -> list[tuple[Task, int]]:
        """The tasks, with their iterations, that a task waits for."""
        part = self.program.ranks[rank]
        desc, gate = part.tasks[index], part.header.iteration_event
        held = [(w.event, w.lag) for w in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits]]
        if gate != NO_EVENT and desc.launch != LaunchKind.SCHEDULER:
            held.append((gate, 0))
        return [
            (task, iteration - lag) for event, lag in held for task in self.producers[rank, event] if iteration >= lag
        ]

    def run(self) -> list[list[np.ndarray]]:
        """The records of each runner of each rank."""
        parts = self.program.ranks
        num_workers, num_schedulers = parts[0].header.num_workers, parts[0].header.num_schedulers
        kept = [[[] for _ in range(num_workers + num_schedulers)] for _ in parts]
        free: dict[Task, int] = defaultdict(lambda: 1000)
        worker = {
            (rank, queue.begin + i): number
            for rank, part in enumerate(parts)
            for number, queue in enumerate(part.queues)
            for i in range(queue.count)
        }
        every = sorted((desc.order, rank, i) for rank, part in enumerate(parts) for i, desc in enumerate(part.tasks))
        for iteration in range(self.num_iterations):
            for order, rank, index in every:
                desc = parts[rank].tasks[index]
                before = self.waits(rank, index, iteration)
                idles = TASK_TYPES[desc.type].may_idle
                hop = {task: self.cross_ns if task[0] != rank else self.hop_ns for task, _ in before}
                earliest = max([self.ended[task, i] + hop[task] for task, i in before if not idles], default=0)
                last = max([self.ended[task, i] for task, i in before], default=None)
                instances = range(desc.max_instances if desc.launch == LaunchKind.MASSIVE else 1)
                if desc.launch == LaunchKind.SPREAD:  # noted once a worker, as the first instance of its share
                    instances = [(worker[rank, index] - desc.first_worker) % num_workers]
                ends = []
                for instance in instances:
                    runner = worker.get((rank, index), instance % num_workers)
                    if desc.launch == LaunchKind.SCHEDULER:
                        runner = num_workers
                    start = max(earliest, free[rank, runner])
                    end = start + (0 if idles else self.random.randint(*self.body_ns)) + FINISH_NS
                    free[rank, runner] = end
                    ends.append(end)
                    ahead = self.ahead_ns[rank]
                    kept[rank][runner].append((index, iteration, instance, FINISH_NS, start + ahead, end + ahead))
                    self.ready[rank, order, iteration, instance] = last
                self.ended[(rank, index), iteration] = max(ends)
        return [[np.array(runner, ENTRY) for runner in runners] for runners in kept]

    def trace(self) -> Trace:
        return assemble(self.program, self.run())


AHEAD_NS = (7_000_000_000_000, 7_000_000_000_000 - 123_456_789, 31, 7_100_000_000_000)


def decode(
    num_ranks: int,
    num_workers: int,
    attention: Literal["massive", "spread"] = "massive",
    host_sizes: tuple[int, ...] = (),
) -> Graph:
    """A step of a model of two layers, whose attention has several instances."""
    sizes = {"max_seqs": 2, "max_model_len": 64, "page_size": 4, "max_kv_splits": 2}
    options = DecodeOptions(num_ranks, num_workers, **sizes, attention_launch=attention, host_sizes=host_sizes)
    return lower_programs(build_model(tiny_config()), options)[0]


def random_program(seed: int) -> Program:
    """A random graph that can be ordered: some overwrite memory on ranks that they get no event from, and are refused."""
    random_ = random.Random(seed)
    while True:
        with contextlib.suppress(UsageError):
            return compile_graph(graphs.random_graph(random_))


@pytest.mark.parametrize("shape", [graphs.push_reduce, decode])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_clock_offsets_of_symmetric_ranks(shape: Callable[[int, int], Graph], num_ranks: int) -> None:
    """If all ranks do the same and signals take equally long in both directions, the offset is exact."""
    simulation = Simulation(compile_graph(shape(num_ranks, 2)), ahead_ns=AHEAD_NS)
    found = simulation.trace()
    ahead = [offset - found.offsets_ns[0] for offset in found.offsets_ns]
    assert ahead == [offset - AHEAD_NS[0] for offset in AHEAD_NS[:num_ranks]]
    # From start to start: a body, a finish and a hop.
    assert found.uncertainty_ns == [0] + [3000 + FINISH_NS + simulation.cross_ns] * (num_ranks - 1)


@pytest.mark.parametrize("seed", range(20))
def test_clock_offsets_are_within_their_bounds(seed: int) -> None:
    """For any graph and any durations of its tasks."""
    shapes = [graphs.ring, graphs.all_reduce, graphs.pipeline, graphs.handed_out]
    program = compile_graph(shapes[seed](4, 2)) if seed < len(shapes) else random_program(seed)
    simulation = Simulation(program, body_ns=(10, 9000), ahead_ns=AHEAD_NS, seed=seed, num_iterations=5)
    found = simulation.trace()
    for rank, doubt in enumerate(found.uncertainty_ns):
        assert doubt >= 0 or seed >= len(shapes), f"no signals between ranks 0 and {rank}"
        if doubt >= 0:
            wrong = found.offsets_ns[rank] - found.offsets_ns[0] - (AHEAD_NS[rank] - AHEAD_NS[0])
            assert abs(wrong) <= doubt + 1, (rank, wrong, doubt)


@pytest.mark.parametrize("seed", range(20))
def test_last_producer_of_every_task(seed: int) -> None:
    """The end of the last producer, by brute force over the simulation's own loops."""
    shapes = [*graphs.SHAPES.values(), decode, functools.partial(decode, attention="spread")]
    program = compile_graph(shapes[seed](2, 2)) if seed < len(shapes) else random_program(seed)
    simulation = Simulation(program, body_ns=(10, 9000), seed=seed)
    found = assemble(simulation.program, simulation.run())
    # Undo the alignment: the simulation's ranks share a clock.
    moved = np.array(found.offsets_ns)
    for row in found.rows:
        key = tuple(int(row[name]) for name in ("rank", "order", "iteration", "instance"))
        want = simulation.ready[key]
        if want is None:
            assert row["ready_ns"] == NEVER, key
        elif (moved == moved[0]).all():
            assert row["ready_ns"] + moved[0] == want, key
        else:
            by_rank = max(
                simulation.ended[task, i] - moved[task[0]]
                for rank, part in enumerate(simulation.program.ranks)
                for index, desc in enumerate(part.tasks)
                if (rank, desc.order) == key[:2]
                for task, i in simulation.waits(rank, index, key[2])
            )
            assert row["ready_ns"] == by_rank, key
    assert len(found.rows) == len(simulation.ready)


@pytest.mark.parametrize("attention", ["massive", "spread"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tables_against_numpy(num_ranks: int, attention: Literal["massive", "spread"]) -> None:
    """Totals, hops and idle shares, recomputed from the rows."""
    simulation = Simulation(compile_graph(decode(num_ranks, 2, attention)), body_ns=(500, 4000), num_iterations=6)
    found = simulation.trace()
    rows = found.on_workers()
    length = rows["end_ns"] - rows["start_ns"]
    table = {(each.op, each.type): each.body_and_finish for each in by_op(found)}
    assert sum(each.count for each in table.values()) == len(rows)
    assert sum(each.total_us for each in table.values()) == pytest.approx(length.sum() / 1000)
    names = np.array([family_of(op) for op in found.ops])[rows["op"]]
    for (op, _), spread in table.items():
        mine = length[names == op]
        assert (spread.count, spread.total_us) == (len(mine), pytest.approx(mine.sum() / 1000)), op
        assert spread.p99_us == pytest.approx(np.percentile(mine, 99) / 1000), op
    span = rows["end_ns"].max() - rows["start_ns"].min()
    for rank, share in enumerate(idle_shares(found)):
        assert share == pytest.approx(1 - length[rows["rank"] == rank].sum() / (2 * span))
    there = found.waited()
    assert sum(spread.count for _, spread in by_event(found)) == there.sum()
    assert sum(s.total_us for _, s in by_event(found)) == pytest.approx(found.rows["idle_ns"][there].sum() / 1000)
    kinds = hops(found)
    assert kinds["same rank"].p50_us == pytest.approx(simulation.hop_ns / 1000)
    assert sum(spread.count for spread in kinds.values()) == there.sum()
    assert bool(kinds["cross rank"].count) == (num_ranks > 1)
    assert bool(kinds["just in time"].count) == (attention == "massive")
    prepared = found.rows[found.rows["launch"] == LaunchKind.SCHEDULER]["start_ns"]
    assert iterations(found).total_us == pytest.approx((prepared.max() - prepared.min()) / 1000)


def test_overlapping_tasks_of_a_worker_count_once() -> None:
    """Against the nanoseconds in which any of a worker's tasks ran, counted one by one."""
    found = Simulation(compile_graph(decode(2, 2)), body_ns=(1000, 4000)).trace()
    rows = found.rows.copy()
    late = np.arange(len(rows)) % 3 == 0
    rows["end_ns"][late] += 700  # beyond the start of what comes next
    rows = rows[rows["runner"] < 2]
    first, last = int(rows["start_ns"].min()), int(rows["end_ns"].max())
    for rank, share in enumerate(idle_shares(dataclasses.replace(found, rows=rows))):
        busy = np.zeros((2, last - first), bool)
        for row in rows[rows["rank"] == rank]:
            busy[row["runner"], row["start_ns"] - first : row["end_ns"] - first] = True
        assert share == pytest.approx(1 - busy.mean()), rank


def test_critical_path_through_a_layer() -> None:
    """With tasks of one length: every operator takes a hop, a body and a finish."""
    found = Simulation(compile_graph(decode(1, 1)), num_iterations=4).trace()
    steps = {step.op: step for step in critical_path(found)}
    assert list(steps) == [
        "scheduler_step",
        "embed",
        "qkv",
        "attention",
        "combine",
        "o",
        "gate_up",
        "down",
        "head",
        "count_tokens",
        "sample_row",
        "sample",
    ]
    for op in ("qkv", "o", "gate_up", "down"):  # one worker: the queue orders them, nothing is waited for
        step = steps[op]
        assert (step.times, step.num_tasks, step.in_layers) == (2, 1, True)
        assert step.wait_to_start == 0 and (step.body, step.finish) == (3.0, 0.1)
        assert step.last_end == step.first_end == pytest.approx(3.1), op
    assert steps["combine"].first_start == steps["combine"].wait_to_start == pytest.approx(0.5)
    total = sum(step.times * step.last_end for step in steps.values())
    assert total == pytest.approx(iterations(found).mean_us, rel=1e-6)


def test_operators_of_another_rank_are_on_the_critical_path() -> None:
    """Rank 1 has no scheduler step: its embedding counts from rank 0's, not from its own last task."""
    simulation = Simulation(compile_graph(decode(2, 1)), num_iterations=4)
    steps = {step.op: step for step in critical_path(simulation.trace())}
    hops_us = [simulation.hop_ns / 1000, simulation.cross_ns / 1000]
    assert steps["embed"].first_start == pytest.approx(sum(hops_us) / 2, abs=0.05)
    assert steps["scheduler_step"].times == 1


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_saved_trace_says_the_same(name: str, tmp_path: Path) -> None:
    found = Simulation(compile_graph(decode(2, 2, host_sizes=(1, 1))), ahead_ns=AHEAD_NS).trace()
    assert found.rows["messages"].any() and "messages between hosts, an iteration: 13 (" in trace.report(found)
    trace.write(found, tmp_path / name)
    again = trace.read(tmp_path / name)
    assert trace.report(again) == trace.report(found)
    for column in trace.ROW.names or ():
        if column not in ("op", "event"):
            np.testing.assert_array_equal(again.rows[column], found.rows[column], column)


def test_incomplete_iterations_are_dropped() -> None:
    """A trace has no iteration of which a runner dropped records."""
    program = compile_graph(graphs.all_reduce(1, 2))
    (runners,) = Simulation(program, num_iterations=6).run()
    total = sum(map(len, runners))
    kept = [
        RunnerRecords(runners[0], 0),
        RunnerRecords(runners[1][5:], 5),
        *[RunnerRecords(each, 0) for each in runners[2:]],
    ]
    found = trace.collect(program, SingleBootstrap(1.0), kept)
    assert found and sorted(set(found.rows["iteration"])) == list(range(5 // len(program.ranks[0].tasks) * 2 + 2, 6))
    assert found.num_dropped == total - len(found.rows)
    assert f"{found.num_dropped} records of earlier ones dropped" in trace.report(found)
    last = trace.collect(program, SingleBootstrap(1.0), kept, 2)
    assert last and set(last.rows["iteration"]) == {4, 5} and last.num_dropped == total - len(last.rows)
    assert (last.rows["ready_ns"] != UNKNOWN).any()
    none = trace.collect(
        program, SingleBootstrap(1.0), [RunnerRecords(each[-1:], max(0, len(each) - 1)) for each in runners]
    )
    assert none and f"no iteration was kept in full; {total} records dropped" in trace.report(none)


def test_names_without_layers() -> None:
    assert [layer_of(op) for op in ("layer3.qkv", "model.layers.12.mlp", "put0", "players.3.x")] == [3, 12, -1, -1]
    assert family_of("layer3.o+layer3.qkv done x4") == "o+qkv done x4"
    assert family_of("model.layers.12.mlp") == "model.mlp" and family_of("put0") == "put0"
