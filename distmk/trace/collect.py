"""Combines the records of every worker and scheduler into one trace of all ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from distmk.abi import LaunchKind
from distmk.backends.launch_block import ENTRY, Entries, RunnerRecords
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.messages import malformed, pack, unpack
from distmk.program.messages import messages_between_hosts
from distmk.program.program import Program, RankProgram
from distmk.program.reader import Ints, ProgramTables
from distmk.trace.dependencies import Dependencies
from distmk.trace.offsets import clock_offsets
from distmk.trace.ready import Times, last_ready
from distmk.trace.record import ROW, UNKNOWN, Rows, Trace

_HEAD = struct.Struct("<qq")  # head of a rank's message: its first iteration and the number of its records


def capacity_for(program: RankProgram, num_iterations: int) -> int:
    """Records that a worker or scheduler needs to hold the last `num_iterations` iterations in full."""
    header = program.header
    descs = [program.tasks[task] for task in program.launches]
    dispatched = sum(-(-d.max_instances // header.num_workers) if d.launch == LaunchKind.MASSIVE else 1 for d in descs)
    longest = max((queue.count for queue in program.queues), default=0)
    return (num_iterations + 1) * max(1, longest + dispatched)


def collect(
    program: Program, bootstrap: Bootstrap, records: Sequence[RunnerRecords], num_iterations: int | None = None
) -> Trace | None:
    """Gather the records of all ranks (`Launch.trace()` on each) into a trace on rank 0; None elsewhere. Collective.

    The trace has only iterations whose records are complete: the last `num_iterations` of these (None: all).
    """
    num_workers = program.ranks[bootstrap.rank].header.num_workers
    last = max(
        (int(each.entries["iteration"].max()) for each in records[:num_workers] if len(each.entries)), default=-1
    )
    # A runner that dropped records may lack some records of its oldest iteration.
    first = max((int(each.entries["iteration"][0]) + 1 for each in records if each.num_dropped), default=0)
    if num_iterations:
        first = max(first, last + 1 - num_iterations)
    num_recorded = sum(len(each.entries) + each.num_dropped for each in records)
    mine = [each.entries[each.entries["iteration"] >= first].tobytes() for each in records]
    gathered = bootstrap.allgather(pack([_HEAD.pack(first, num_recorded), *mine]))
    if bootstrap.rank:
        return None
    by_rank = [_read(payload, rank, program.ranks[rank]) for rank, payload in enumerate(gathered)]
    first = max(each for each, _, _ in by_rank)
    ranks = [[part[part["iteration"] >= first] for part in parts] for _, _, parts in by_rank]
    num_left = sum(len(part) for parts in ranks for part in parts)
    return assemble(program, ranks, sum(recorded for _, recorded, _ in by_rank) - num_left)


def _read(payload: bytes, rank: int, program: RankProgram) -> tuple[int, int, list[Entries]]:
    """A rank's first iteration, number of records, and entries by runner. DistmkError: the rank sent something else."""
    header = program.header
    head, *parts = unpack(payload, f"rank {rank}", 1 + header.num_workers + header.num_schedulers)
    if len(head) != _HEAD.size or any(len(part) % ENTRY.itemsize for part in parts):
        raise malformed(f"rank {rank}", "trace")
    entries = [np.frombuffer(part, ENTRY) for part in parts]
    if any((each["task"] >= len(program.tasks)).any() for each in entries):
        raise malformed(f"rank {rank}", "trace of this program")
    first, num_recorded = _HEAD.unpack(head)
    return first, num_recorded, entries


def assemble(program: Program, ranks: Sequence[Sequence[Entries]], num_dropped: int = 0) -> Trace:
    """The trace of `ranks[rank][runner]`: the entries of each worker, then of each scheduler, oldest first."""
    dependencies = Dependencies.of(program)
    tables = dependencies.tables
    rows, task = _rows(tables, ranks)
    times = Times.of(tables, rows, task)
    offsets = clock_offsets(dependencies, times)
    origin = _align(rows, offsets.ahead_ns)
    ready = last_ready(dependencies, Times.of(tables, rows, task))
    cell = (task, rows["iteration"] - times.first)
    rows["ready_ns"], producer, event = ready.ready_ns[cell], ready.producer[cell], ready.event[cell]
    rows["source"] = np.where(producer >= 0, tables.tasks.rank[producer], -1)
    names, rows["event"] = _distinct(tables.event_names(), event)
    ops, rows["op"] = _distinct(tables.task_names(), task)
    _fill_idle(rows)
    ahead = [offset + origin for offset in offsets.ahead_ns]
    return Trace(rows, ops, names, tables.num_workers, ahead, offsets.uncertainty_ns, num_dropped)


def _rows(tables: ProgramTables, ranks: Sequence[Sequence[Entries]]) -> tuple[Rows, Ints]:
    """Rows with the columns that entries and descriptors give, and the task of each row."""
    parts, numbers = [], []
    for rank, runners in enumerate(ranks):
        for runner, entries in enumerate(runners):
            rows = np.zeros(len(entries), ROW)
            rows["rank"], rows["runner"] = rank, runner
            for name in ("iteration", "instance", "start_ns", "end_ns", "finish_ns"):
                rows[name] = entries[name]
            parts.append(rows)
            numbers.append(tables.task_of[rank][entries["task"]])
    rows, task = np.concatenate(parts), np.concatenate(numbers)
    for name in ("type", "launch", "order"):
        rows[name] = getattr(tables.tasks, name)[task]
    ran = (rows["runner"] < tables.num_workers) | (rows["launch"] == LaunchKind.SCHEDULER)  # not only dispatched it
    rows["messages"] = np.where(ran, messages_between_hosts(tables)[task], 0)
    return rows, task


def _align(rows: Rows, ahead_ns: list[int]) -> int:
    """Move all rows to rank 0's clock, counted from the first start, and return that start."""
    ahead = np.array(ahead_ns, np.int64)[rows["rank"]]
    origin = int((rows["start_ns"] - ahead).min(initial=UNKNOWN)) if len(rows) else 0
    for name in ("start_ns", "end_ns"):
        rows[name] -= ahead + origin
    return origin


def _distinct(names: list[str], index: Ints) -> tuple[list[str], Ints]:
    """The distinct names among `names[index]` (-1: none), and for each element its index into these."""
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(names[i] for i in np.unique(index[index >= 0])))
    }
    table = np.array([numbers.get(name, -1) for name in names] + [-1], np.int64)
    return list(numbers), table[index]


def _fill_idle(rows: Rows) -> None:
    """Fill in `idle_ns`, the time since the previous row of the same runner ended; 0 for the runner's first row."""
    same = (np.diff(rows["rank"]) == 0) & (np.diff(rows["runner"]) == 0)
    rows["idle_ns"][1:] = np.where(same, np.maximum(rows["start_ns"][1:] - rows["end_ns"][:-1], 0), 0)
