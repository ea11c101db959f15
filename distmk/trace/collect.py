"""From what each runner kept to one trace of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from distmk.abi import LaunchKind
from distmk.backends.base import ENTRY, Entries, Kept
from distmk.bootstrap import Bootstrap
from distmk.program.program import Program, RankProgram
from distmk.trace.offsets import clock_offsets
from distmk.trace.ready import Times, last_ready
from distmk.trace.record import ROW, UNKNOWN, Ints, Rows, Trace
from distmk.trace.wiring import Wiring


def capacity_for(program: RankProgram, num_iterations: int) -> int:
    """Records a runner needs so that the last `num_iterations` iterations are there in full."""
    header = program.header
    descs = [program.tasks[task] for task in program.launches]
    handed = sum(-(-d.max_instances // header.num_workers) if d.launch == LaunchKind.MASSIVE else 1 for d in descs)
    longest = max((queue.count for queue in program.queues), default=0)
    return (num_iterations + 1) * max(1, longest + handed)


def collect(
    program: Program, bootstrap: Bootstrap, kept: Sequence[Kept], num_iterations: int | None = None
) -> Trace | None:
    """Gather what the runners of every rank kept (`Launch.trace()`) on rank 0; None elsewhere. Collective.

    The trace has iterations of which everything was kept, and of those the last `num_iterations` (None: all).
    """
    num_workers = program.ranks[bootstrap.rank].header.num_workers
    last = max((int(each.entries["iteration"].max()) for each in kept[:num_workers] if len(each.entries)), default=-1)
    # A runner without room for all may have lost a part of the oldest iteration that it knows of.
    first = max((int(each.entries["iteration"][0]) + 1 for each in kept if each.num_dropped), default=0)
    if num_iterations:
        first = max(first, last + 1 - num_iterations)
    num_seen = sum(len(each.entries) + each.num_dropped for each in kept)
    mine = [each.entries[each.entries["iteration"] >= first].tobytes() for each in kept]
    gathered = [pickle.loads(part) for part in bootstrap.allgather(pickle.dumps((mine, first, num_seen)))]
    if bootstrap.rank:
        return None
    first = max(each for _, each, _ in gathered)
    ranks = [[np.frombuffer(part, ENTRY) for part in parts] for parts, _, _ in gathered]
    ranks = [[part[part["iteration"] >= first] for part in parts] for parts in ranks]
    num_there = sum(len(part) for parts in ranks for part in parts)
    return assemble(program, ranks, sum(seen for _, _, seen in gathered) - num_there)


def assemble(program: Program, ranks: Sequence[Sequence[Entries]], num_dropped: int = 0) -> Trace:
    """The trace of `ranks[rank][runner]`, what each runner kept, oldest first."""
    wiring, num_workers = Wiring(program), int(program.ranks[0].header.num_workers)
    rows, task = _rows(wiring, ranks)
    times = Times.of(wiring, rows, task, num_workers)
    offsets = clock_offsets(wiring, times, len(ranks))
    origin = _align(rows, offsets.ahead_ns)
    ready = last_ready(wiring, Times.of(wiring, rows, task, num_workers))
    at = (task, rows["iteration"] - times.first)
    rows["ready_ns"], producer, event = ready.ready_ns[at], ready.producer[at], ready.event[at]
    rows["source"] = np.where(producer >= 0, wiring.task_rank[producer], -1)
    names, rows["event"] = _named([name for part in program.ranks for name in part.event_names], event)
    ops, rows["op"] = _named([name for part in program.ranks for name in part.task_names], task)
    _fill_idle(rows)
    ahead = [offset + origin for offset in offsets.ahead_ns]
    return Trace(rows, ops, names, num_workers, ahead, offsets.uncertainty_ns, num_dropped)


def _rows(wiring: Wiring, ranks: Sequence[Sequence[Entries]]) -> tuple[Rows, Ints]:
    """Rows as far as entries tell, and of each the task, numbered through."""
    parts, tasks = [], []
    for rank, runners in enumerate(ranks):
        for runner, entries in enumerate(runners):
            rows = np.zeros(len(entries), ROW)
            rows["rank"], rows["runner"] = rank, runner
            for name in ("iteration", "instance", "start_ns", "end_ns", "finish_ns"):
                rows[name] = entries[name]
            parts.append(rows)
            tasks.append(entries["task"].astype(np.int64) + wiring.first_task[rank])
    rows, task = np.concatenate(parts), np.concatenate(tasks)
    rows["type"], rows["launch"], rows["order"] = wiring.type[task], wiring.launch[task], wiring.order[task]
    return rows, task


def _align(rows: Rows, ahead_ns: list[int]) -> int:
    """Put all rows on rank 0's clock, from the first start on; returns that start."""
    off = np.array(ahead_ns, np.int64)[rows["rank"]]
    origin = int((rows["start_ns"] - off).min(initial=UNKNOWN)) if len(rows) else 0
    for name in ("start_ns", "end_ns"):
        rows[name] -= off + origin
    return origin


def _named(names: list[str], index: Ints) -> tuple[list[str], Ints]:
    """The distinct names that `index` (-1: none) picks, and the index into those."""
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(names[i] for i in np.unique(index[index >= 0])))
    }
    table = np.array([numbers.get(name, -1) for name in names] + [-1], np.int64)
    return list(numbers), table[index]


def _fill_idle(rows: Rows) -> None:
    """What lies between a row and the one before of the same runner; 0 for a runner's first."""
    same = (np.diff(rows["rank"]) == 0) & (np.diff(rows["runner"]) == 0)
    rows["idle_ns"][1:] = np.where(same, np.maximum(rows["start_ns"][1:] - rows["end_ns"][:-1], 0), 0)
