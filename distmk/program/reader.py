"""A program's bytes as flat arrays over all ranks: tasks, queues, waits and triggers. `check` and `trace` use it.

Tasks have one numbering: rank 0's first, then rank 1's, and so on. Events are numbered in the same way. Any bytes can
be read. A reference that points outside its table is left out, and `distmk.check` refuses a program that has one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import LaunchKind, Queue, TaskDesc, Trigger, Wait
from distmk.program.program import Program, RankProgram

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Descriptors = npt.NDArray[Any]  # structured, the fields of TaskDesc


def as_array(section: Any, struct: Any) -> npt.NDArray[Any]:
    """A section (ctypes array) of a program as a numpy array with the same fields, in the same memory."""
    dtype: np.dtype[Any] = np.dtype(struct)
    return np.frombuffer(section, dtype) if len(section) else np.empty(0, dtype)


@dataclass(frozen=True)
class Tasks:
    """One element per task: int64 or bool [num_tasks]."""

    rank: Ints
    type: Ints  # tasks.TASK_TYPES
    launch: Ints  # abi.LaunchKind
    spread: Flags
    order: Ints  # position in the program's sequential order
    max_instances: Ints
    first_worker: Ints
    deep_lookahead: Flags
    worker: Ints  # the worker whose queue has the task; -1: no queue, or every queue


@dataclass(frozen=True)
class Waits:
    """One element per wait, in task order: int64 [num_waits]."""

    task: Ints
    event: Ints  # -1: the rank has no such event
    count: Ints
    lag: Ints
    record: Ints  # index among the wait records of all ranks


@dataclass(frozen=True)
class Triggers:
    """One element per trigger, in task order: int64 [num_triggers]."""

    task: Ints
    event: Ints  # -1: there is no such rank, or it has no such event
    amount: Ints
    record: Ints  # index among the trigger records of all ranks


@dataclass(frozen=True)
class ProgramTables:
    """A program, decoded."""

    program: Program
    num_ranks: int
    num_workers: int  # workers per rank
    num_schedulers: int  # schedulers per rank
    first_task: Ints  # [num_ranks + 1]: the first task of each rank, and the number of tasks
    first_event: Ints  # [num_ranks + 1]: the first event of each rank, and the number of events
    event_rank: Ints  # [num_events]
    descriptor_of: list[Ints]  # by rank: the (first) descriptor of each of its tasks
    task_of: list[Ints]  # by rank: the task of each of its descriptors
    tasks: Tasks
    queues: list[Ints]  # by rank * num_workers + worker: its tasks, in the order in which they run
    launches: list[list[int]]  # by rank: the tasks that its schedulers dispatch
    waits: Waits
    triggers: Triggers

    @property
    def ranks(self) -> Sequence[RankProgram]:
        return self.program.ranks

    @property
    def num_tasks(self) -> int:
        return int(self.first_task[-1])

    @property
    def num_events(self) -> int:
        return int(self.first_event[-1])

    def task_names(self) -> list[str]:
        """The operator of every task."""
        return [
            part.task_names[index]
            for part, descriptors in zip(self.ranks, self.descriptor_of, strict=True)
            for index in descriptors.tolist()
        ]

    def event_names(self) -> list[str]:
        return [name for part in self.ranks for name in part.event_names]

    def describe_task(self, task: int, worker: int = -1) -> str:
        """Name, rank and worker of a task. With `worker`: of that worker's copy of a spread task."""
        rank = int(self.tasks.rank[task])
        index = int(self.descriptor_of[rank][task - self.first_task[rank]])
        worker = max(worker, int(self.tasks.worker[task]))
        elsewhere = "every worker" if self.tasks.spread[task] else "dispatched"
        runner = f"worker {worker}" if worker >= 0 else elsewhere
        return f"{_name(self.ranks[rank].task_names, index, 'task')} (rank {rank}, {runner})"

    def describe_event(self, event: int) -> str:
        """Number, name and rank of an event."""
        rank = int(self.event_rank[event])
        index = event - int(self.first_event[rank])
        return f"event {index} '{_name(self.ranks[rank].event_names, index, 'event')}' of rank {rank}"


def read_tables(program: Program, *, merge_copies: bool = True) -> ProgramTables:
    """Decode `program`.

    `merge_copies`: a spread task, which has a descriptor in every worker's queue, is one task; otherwise each copy is a
    task.
    """
    ranks = program.ranks
    num_ranks, num_workers = len(ranks), int(ranks[0].header.num_workers)
    whole = [as_array(part.tasks, TaskDesc) for part in ranks]
    numbered = [_merged(descs) if merge_copies else _unmerged(descs) for descs in whole]
    descriptor_of = [first for first, _ in numbered]
    first_task = np.cumsum([0, *map(len, descriptor_of)])
    first_event = np.cumsum([0, *(int(part.header.num_events) for part in ranks)])
    task_of = [number + first for (_, number), first in zip(numbered, first_task[:-1], strict=True)]
    queues = [
        tasks[slice(*queue_range(queue, len(tasks)))]
        for part, tasks in zip(ranks, task_of, strict=True)
        for queue in part.queues
    ]
    descs = [every[first] for every, first in zip(whole, descriptor_of, strict=True)]
    task_rank: Ints = np.repeat(np.arange(num_ranks), [len(each) for each in descs])
    every = np.concatenate(descs)
    return ProgramTables(
        program=program,
        num_ranks=num_ranks,
        num_workers=num_workers,
        num_schedulers=int(ranks[0].header.num_schedulers),
        first_task=first_task,
        first_event=first_event,
        event_rank=np.repeat(np.arange(num_ranks), np.diff(first_event)),
        descriptor_of=descriptor_of,
        task_of=task_of,
        tasks=_tasks(every, task_rank, _workers(every, queues, num_workers, merge_copies)),
        queues=queues,
        launches=[_launched(part, tasks) for part, tasks in zip(ranks, task_of, strict=True)],
        waits=_waits(ranks, descs, task_rank, first_event),
        triggers=_triggers(ranks, descs, first_event),
    )


def queue_range(queue: Queue, num_descriptors: int) -> tuple[int, int]:
    """The descriptors [begin, end) of a worker's queue; an empty range if some of them do not exist."""
    begin, end = queue.begin, queue.begin + queue.count
    return (begin, end) if end <= num_descriptors else (0, 0)


def _name(names: list[str], index: int, kind: str) -> str:
    """`names[index]`, or the bare index if the list of names is too short."""
    return names[index] if 0 <= index < len(names) else f"{kind} {index}"


def _merged(descs: Descriptors) -> tuple[Ints, Ints]:
    """The first descriptor of every task, and the task of every descriptor.

    Spread descriptors with the same `order` are one task.
    """
    spread = np.flatnonzero(descs["launch"] == LaunchKind.SPREAD)
    _, first, copy_of = np.unique(descs["order"][spread], return_index=True, return_inverse=True)
    is_first = descs["launch"] != LaunchKind.SPREAD
    is_first[spread[first]] = True
    number = np.cumsum(is_first) - 1
    number[spread] = number[spread[first][copy_of]]
    return np.flatnonzero(is_first), number


def _unmerged(descs: Descriptors) -> tuple[Ints, Ints]:
    every = np.arange(len(descs))
    return every, every


def _tasks(descs: Descriptors, rank: Ints, worker: Ints) -> Tasks:
    fields = {
        name: descs[name].astype(np.int64) for name in ("type", "launch", "order", "max_instances", "first_worker")
    }
    spread, deep = descs["launch"] == LaunchKind.SPREAD, descs["deep_lookahead"] != 0
    return Tasks(rank=rank, worker=worker, spread=spread, deep_lookahead=deep, **fields)


def _workers(descs: Descriptors, queues: list[Ints], num_workers: int, merge_copies: bool) -> Ints:
    worker: Ints = np.full(len(descs), -1)
    for index, queue in enumerate(queues):
        worker[queue] = index % num_workers
    if merge_copies:
        worker[descs["launch"] == LaunchKind.SPREAD] = -1
    return worker


def _launched(part: RankProgram, tasks: Ints) -> list[int]:
    launches = as_array(part.launches, ctypes.c_uint32).astype(np.int64)
    return [int(task) for task in tasks[launches[launches < len(tasks)]]]


def _records(ranks: Sequence[RankProgram], descs: list[Descriptors], what: str) -> tuple[Ints, Ints]:
    """Task and record of each wait or trigger (`what`: wait, trigger). A record is an index among those of all ranks.

    A range that leaves its rank's table counts as empty. If the ranges add up to more than the tasks can have, all
    count as empty, so that no damaged program makes arrays of billions.
    """
    tasks, records, first_task, first_record = [], [], 0, 0
    for part, desc in zip(ranks, descs, strict=True):
        num_records = len(getattr(part, f"{what}s"))
        begin, count = desc[f"{what}_begin"].astype(np.int64), desc[f"num_{what}s"].astype(np.int64)
        count = np.where(begin + count > num_records, 0, count)
        if count.sum() > num_records * part.header.num_workers:  # copies of a spread task share their records
            count = np.zeros_like(count)
        tasks.append(np.repeat(np.arange(len(desc)), count) + first_task)
        ends = np.cumsum(count)
        records.append(np.arange(count.sum()) - np.repeat(ends - count, count) + np.repeat(begin, count) + first_record)
        first_task += len(desc)
        first_record += num_records
    return np.concatenate(tasks), np.concatenate(records)


def _waits(ranks: Sequence[RankProgram], descs: list[Descriptors], task_rank: Ints, first_event: Ints) -> Waits:
    task, record = _records(ranks, descs, "wait")
    waits = np.concatenate([as_array(part.waits, Wait) for part in ranks])[record]
    rank, event = task_rank[task], waits["event"].astype(np.int64)
    event = np.where(event < np.diff(first_event)[rank], event + first_event[rank], -1)
    return Waits(task, event, waits["count"].astype(np.int64), waits["lag"].astype(np.int64), record)


def _triggers(ranks: Sequence[RankProgram], descs: list[Descriptors], first_event: Ints) -> Triggers:
    task, record = _records(ranks, descs, "trigger")
    triggers = np.concatenate([as_array(part.triggers, Trigger) for part in ranks])[record]
    rank, event = triggers["rank"].astype(np.int64), triggers["event"].astype(np.int64)
    there = np.minimum(rank, len(ranks) - 1)
    known = (rank < len(ranks)) & (event < np.diff(first_event)[there])
    event = np.where(known, event + first_event[there], -1)
    return Triggers(task, event, triggers["amount"].astype(np.int64), record)
