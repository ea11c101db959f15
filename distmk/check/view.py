"""The encoded programs of all ranks as flat arrays, once their headers, sections and queues have been found sound.

Tasks and events of all ranks are numbered through: rank 0's first, then rank 1's. A spread task is one task, of which
every worker's queue holds a copy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk import abi
from distmk.abi import LISTED, LaunchKind, ProgramHeader, Queue, TaskDesc, Trigger, Wait
from distmk.check.findings import Findings, name_at
from distmk.program.program import Program, RankProgram
from distmk.tasks import TASK_TYPES, SchedulerStep, Task
from distmk.tasks.abi_header import abi_hash

Ints = npt.NDArray[np.int64]
SECTIONS = {"tasks": TaskDesc, "waits": Wait, "triggers": Trigger, "queues": Queue, "launches": ctypes.c_uint32}
COUNTED = {"tasks": "num_tasks", "waits": "num_waits", "triggers": "num_triggers", "launches": "num_launches"}
SHARED = (
    "num_ranks",
    "num_workers",
    "num_schedulers",
    "jit_capacity",
    "zeroed_heap_bytes",
    "events_heap_offset",
    "rings_heap_offset",
    "heap_bytes",
)
MAX_QUEUE = 16000  # positions in a clock are 16 bits: two iterations of up to two steps a task
MAX_FIRINGS = 2**31  # of one trigger in one iteration
MAX_EVENTS = 2**24


def as_array(part: Any, kind: Any) -> npt.NDArray[Any]:
    """A ctypes array as a numpy one of the same fields (shares its memory)."""
    dtype: np.dtype[Any] = np.dtype(kind)
    return np.frombuffer(part, dtype) if len(part) else np.empty(0, dtype)


def _number_tasks(descs: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """The first descriptor of every task, and which task each descriptor is one of: spread ones of the same place in
    the program's order are one task.
    """
    spread = np.flatnonzero(descs["launch"] == LaunchKind.SPREAD)
    _, first, which = np.unique(descs["order"][spread], return_index=True, return_inverse=True)
    is_first = descs["launch"] != LaunchKind.SPREAD
    is_first[spread[first]] = True
    number = np.cumsum(is_first) - 1
    number[spread] = number[spread[first][which]]
    return np.flatnonzero(is_first), number


def check_headers(program: Program, findings: Findings) -> None:
    """Every rank's header says what this package and the other ranks say."""
    if not program.ranks:
        findings.add("header", "the program has no ranks")
        return
    first = program.ranks[0].header
    for rank, part in enumerate(program.ranks):
        header = part.header
        if header.magic != abi.MAGIC or header.abi_hash != abi_hash():
            findings.add("header", f"rank {rank} has another magic or ABI hash than this package")
        if header.rank != rank or header.num_ranks != program.num_ranks:
            text = f"rank {rank} of {program.num_ranks} says it is rank {header.rank} of {header.num_ranks}"
            findings.add("header", text)
        for field in SHARED:
            here, there = getattr(header, field), getattr(first, field)
            if here != there:
                findings.add("header", f"rank {rank} has {field} {here}, rank 0 has {there}")
        _check_shape(rank, part, findings)
    _check_placement(program, findings)


def _check_shape(rank: int, part: RankProgram, findings: Findings) -> None:
    header = part.header
    if not 1 <= header.num_schedulers <= header.num_workers:
        text = f"rank {rank} has {header.num_schedulers} schedulers for {header.num_workers} workers"
        findings.add("header", text)
    if header.jit_capacity < 1 or header.jit_capacity & (header.jit_capacity - 1):
        findings.add("header", f"rank {rank}: a ring of {header.jit_capacity} entries is not a power of two")
    if header.num_events > MAX_EVENTS:
        findings.add("header", f"rank {rank} has {header.num_events} events")
    offset = ctypes.sizeof(ProgramHeader)
    for name in SECTIONS:
        section = getattr(part, name)
        count = getattr(header, COUNTED[name]) if name in COUNTED else header.num_workers
        if len(section) != count:
            findings.add("section", f"rank {rank} has {len(section)} {name}, its header says {count}")
        if getattr(header, f"{name}_offset") != offset:
            text = f"rank {rank}: {name} lie at {offset}, its header says {getattr(header, f'{name}_offset')}"
            findings.add("section", text)
        offset += ctypes.sizeof(section)
    if header.program_bytes != offset:
        findings.add("section", f"rank {rank}: the program has {offset} bytes, its header says {header.program_bytes}")


def _check_placement(program: Program, findings: Findings) -> None:
    placement, first = program.placement, program.ranks[0].header
    for field in ("events_heap_offset", "rings_heap_offset", "jit_capacity", "zeroed_heap_bytes", "heap_bytes"):
        if getattr(placement, field) != getattr(first, field):
            text = f"the placement has {field} {getattr(placement, field)}, rank 0 has {getattr(first, field)}"
            findings.add("header", text)
    ours = [part.header.local_bytes for part in program.ranks]
    if list(placement.local_bytes) != ours:
        findings.add("header", f"the placement has local_bytes {list(placement.local_bytes)}, the ranks have {ours}")


class View:
    """Flat arrays of all ranks' tasks, waits and triggers. Build it only from headers that were found sound.

    `descriptors[rank]` says where the tasks of a rank are described, `worker` in whose queue a task is (-1: in no one's).
    """

    def __init__(self, program: Program, findings: Findings) -> None:
        self.program = program
        self.parts = program.ranks
        self.num_ranks = program.num_ranks
        self.num_workers = int(self.parts[0].header.num_workers)
        self.num_schedulers = int(self.parts[0].header.num_schedulers)
        whole = [as_array(part.tasks, TaskDesc) for part in self.parts]
        self.descriptors, numbers = zip(*map(_number_tasks, whole), strict=True)
        descs = [desc[kept] for desc, kept in zip(whole, self.descriptors, strict=True)]
        self.first_task = np.cumsum([0, *(len(d) for d in descs)])
        self.first_event = np.cumsum([0, *(int(part.header.num_events) for part in self.parts)])
        self.num_tasks, self.num_events = int(self.first_task[-1]), int(self.first_event[-1])
        self.task_rank: Ints = np.repeat(np.arange(self.num_ranks), [len(d) for d in descs])
        self.event_rank: Ints = np.repeat(np.arange(self.num_ranks), np.diff(self.first_event))
        every = np.concatenate(descs)
        self.types, self.launch = every["type"].astype(np.int64), every["launch"].astype(np.int64)
        self.spread = self.launch == LaunchKind.SPREAD
        self.max_instances = every["max_instances"].astype(np.int64)
        self.deep_lookahead = every["deep_lookahead"] != 0
        self.first_worker = every["first_worker"].astype(np.int64)
        self.worker: Ints = np.full(self.num_tasks, -1)
        self.queues: list[Ints] = []  # the tasks of every worker
        self.launches: list[list[int]] = []  # of each rank
        for rank, part in enumerate(self.parts):
            number = numbers[rank] + self.first_task[rank]
            self._check_copies(whole[rank], number, self.descriptors[rank][numbers[rank]], findings)
            self._read_queues(rank, part, whole[rank], number, findings)
        self._check_tasks(findings)
        self._check_spread(findings)
        self._read_waits(descs, findings)
        self._read_triggers(descs, findings)

    def task_name(self, task: int, worker: int = -1) -> str:
        """The task's name, rank and place; with `worker`, that of its copy there."""
        rank = int(self.task_rank[task])
        name = name_at(self.parts[rank].task_names, int(self.descriptors[rank][task - self.first_task[rank]]), "task")
        worker = max(worker, int(self.worker[task]))
        elsewhere = "every worker" if self.spread[task] else "handed out"
        return f"{name} (rank {rank}, {f'worker {worker}' if worker >= 0 else elsewhere})"

    def event_name(self, event: int) -> str:
        """The event's name, number and rank."""
        rank = int(self.event_rank[event])
        index = event - int(self.first_event[rank])
        return f"event {index} '{name_at(self.parts[rank].event_names, index, 'event')}' of rank {rank}"

    def firings(self, task: int) -> int:
        """How often a trigger of a task is fired an iteration: by every worker that has a share of a spread task, and
        for all of a massive launch by every scheduler.
        """
        if self.spread[task]:
            return self.num_workers
        if self.launch[task] == LaunchKind.MASSIVE:
            return int(self.max_instances[task]) * self.num_schedulers
        return 1

    def _check_tasks(self, findings: Findings) -> None:
        scheduled = np.flatnonzero(self.launch == LaunchKind.SCHEDULER)
        for task in np.flatnonzero(~np.isin(self.types, list(TASK_TYPES))):
            findings.add("task", f"{self.task_name(int(task))} is of unknown type {self.types[task]}")
        for task in np.flatnonzero(self.launch > max(LaunchKind)):
            findings.add("task", f"{self.task_name(int(task))} has unknown launch kind {self.launch[task]}")
        for task in scheduled:
            if self.task_rank[task] != 0 or len(scheduled) > 1 or self.types[task] != SchedulerStep.type_id:
                text = "is run by a scheduler: only one task of rank 0 may be, the one that prepares the next batch"
                findings.add("task", f"{self.task_name(int(task))} {text}")
        massive = self.launch == LaunchKind.MASSIVE
        # Any other task may be of a type that could have many instances, but it runs as one.
        single = ~massive & ~self.spread
        wrong = (self.max_instances < 1) | (massive & (self.max_instances * self.num_schedulers > MAX_FIRINGS))
        for task in np.flatnonzero(wrong | (single & (self.max_instances != 1))):
            findings.add("task", f"{self.task_name(int(task))} has {self.max_instances[task]} instances")

    def _check_copies(self, descs: npt.NDArray[Any], number: Ints, first: Ints, findings: Findings) -> None:
        """Descriptors of one task are the same bytes; `first` is the first of those that each is one of."""
        copies = np.flatnonzero(first != np.arange(len(descs)))
        raw = descs.view(np.uint8).reshape(len(descs), descs.itemsize)
        differ = (raw[copies] != raw[first[copies]]).any(axis=1)
        for task in np.unique(number[copies[differ]]):
            findings.add("spread", f"{self.task_name(int(task))} is not the same for all workers")

    def _check_spread(self, findings: Findings) -> None:
        """Every worker has a share of a spread task, once, and nothing is in the way of dealing it out."""
        tasks = np.flatnonzero(self.spread)
        times = np.zeros((len(tasks), self.num_workers), np.int64)
        for place, queue in enumerate(self.queues):
            np.add.at(times, (np.searchsorted(tasks, queue[self.spread[queue]]), place % self.num_workers), 1)
        for row, worker in np.argwhere(times != 1):
            text = f"is in the queue of worker {worker} {times[row, worker]} times, expected once"
            findings.add("spread", f"{self.task_name(int(tasks[row]))} {text}")
        for task in tasks:
            if self.first_worker[task] >= self.num_workers:
                text = f"begins at worker {self.first_worker[task]} of {self.num_workers}"
                findings.add("spread", f"{self.task_name(int(task))} {text}")
            kind = TASK_TYPES.get(int(self.types[task]), Task)
            if self.max_instances[task] > self.num_workers and not kind.goes_through_shares:
                text = f"has {self.max_instances[task]} instances for {self.num_workers} workers, and its body runs one"
                findings.add("spread", f"{self.task_name(int(task))} {text}")
            if kind.streams_weights:
                findings.add("spread", f"{self.task_name(int(task))} streams weights, which a spread task must not")

    def _read_queues(
        self, rank: int, part: RankProgram, descs: npt.NDArray[Any], number: Ints, findings: Findings
    ) -> None:
        """`number[i]` is the task that descriptor i is one of."""
        count = len(descs)
        queued = np.zeros(count, np.int64)
        for worker, queue in enumerate(part.queues):
            begin, end = queue.begin, queue.begin + queue.count
            if end > count:
                findings.add("queue", f"rank {rank} worker {worker}: tasks {begin} to {end} of {count}")
                begin = end = 0
            if end - begin > MAX_QUEUE:
                findings.add("queue", f"rank {rank} worker {worker} has {end - begin} tasks, over {MAX_QUEUE}")
            queued[begin:end] += 1
            self.queues.append(number[begin:end])
            self.worker[self.queues[-1]] = worker
        handed = as_array(part.launches, ctypes.c_uint32).astype(np.int64)
        for task in handed[handed >= count]:
            findings.add("launch", f"rank {rank} hands out task {task} of {count}")
        handed = handed[handed < count]
        self.launches.append([int(number[task]) for task in handed])
        launched = np.bincount(handed, minlength=count)
        ahead = np.isin(descs["launch"], LISTED)
        self.worker[number[descs["launch"] == LaunchKind.SPREAD]] = -1
        for times, wanted, where in ((queued, ahead, "queues"), (launched, ~ahead, "launch lists")):
            for task in np.flatnonzero(times != wanted):
                text = f"is in {times[task]} {where}, expected {int(wanted[task])}"
                findings.add("queue", f"{self.task_name(int(number[task]))} {text}")

    def _ranges(self, descs: list[npt.NDArray[Any]], what: str, findings: Findings) -> tuple[Ints, Ints]:
        """Of each wait (or trigger) that a task holds: the task, and the index among those of all ranks."""
        tasks, indices, first = [], [], 0
        for rank, desc in enumerate(descs):
            size = len(getattr(self.parts[rank], f"{what}s"))
            begin, count = desc[f"{what}_begin"].astype(np.int64), desc[f"num_{what}s"].astype(np.int64)
            for task in np.flatnonzero(begin + count > size):
                name = self.task_name(int(self.first_task[rank] + task))
                text = f"holds {what}s {begin[task]} to {begin[task] + count[task]} of {size}"
                findings.add("section", f"{name} {text}")
            if count.sum() > size:
                findings.add("section", f"rank {rank}: tasks share {what}s ({count.sum()} held, {size} there)")
            count = np.where(begin + count > size, 0, count) if count.sum() <= size else np.zeros_like(count)
            tasks.append(np.repeat(np.arange(len(desc)), count) + self.first_task[rank])
            ends = np.cumsum(count)
            indices.append(first + np.arange(count.sum()) - np.repeat(ends - count, count) + np.repeat(begin, count))
            first += size
        return np.concatenate(tasks), np.concatenate(indices)

    def _read_waits(self, descs: list[npt.NDArray[Any]], findings: Findings) -> None:
        self.wait_task, index = self._ranges(descs, "wait", findings)
        waits = np.concatenate([as_array(part.waits, Wait) for part in self.parts])[index]
        rank = self.task_rank[self.wait_task]
        event = waits["event"].astype(np.int64)
        good = event < np.diff(self.first_event)[rank]
        for i in np.flatnonzero(~good):
            name = self.task_name(int(self.wait_task[i]))
            findings.add("event", f"{name} waits for event {event[i]} of {np.diff(self.first_event)[rank[i]]}")
        self.wait_event: Ints = np.where(good, event + self.first_event[rank], 0)
        self.wait_count, self.wait_lag = waits["count"].astype(np.int64), waits["lag"].astype(np.int64)

    def _read_triggers(self, descs: list[npt.NDArray[Any]], findings: Findings) -> None:
        self.trigger_task, index = self._ranges(descs, "trigger", findings)
        triggers = np.concatenate([as_array(part.triggers, Trigger) for part in self.parts])[index]
        rank, event = triggers["rank"].astype(np.int64), triggers["event"].astype(np.int64)
        on = np.minimum(rank, self.num_ranks - 1)
        good = (rank < self.num_ranks) & (event < np.diff(self.first_event)[on])
        for i in np.flatnonzero(~good):
            name = self.task_name(int(self.trigger_task[i]))
            findings.add("event", f"{name} triggers event {event[i]} of rank {rank[i]}, which is not there")
        self.trigger_event: Ints = np.where(good, event + self.first_event[on], 0)
        self.trigger_amount = triggers["amount"].astype(np.int64)
