"""References point at something, tasks are of known kinds, and every worker runs each of its tasks exactly once."""

from __future__ import annotations

import ctypes

import numpy as np

from distmk.abi import LISTED, TASK_ARGS_BYTES, LaunchKind, TaskDesc, Trigger, Wait
from distmk.check.findings import Findings
from distmk.program.program import decode_args
from distmk.program.reader import Descriptors, Ints, ProgramTables, as_array, queue_range
from distmk.tasks import TASK_TYPES, SchedulerStep, Task

MAX_QUEUE = 16000  # tasks. Positions in a vector clock have 16 bits: two iterations of up to two positions a task
MAX_FIRINGS = 2**31  # limit for one trigger in one iteration


def check_structure(tables: ProgramTables, findings: Findings) -> None:
    """Check references, task kinds, queues and spread copies."""
    whole = [as_array(part.tasks, TaskDesc) for part in tables.ranks]
    for rank, descs in enumerate(whole):
        _check_copies(tables, rank, descs, findings)
        _check_queues(tables, rank, descs, findings)
    _check_tasks(tables, findings)
    _check_pipeline(tables, findings)
    _check_padding(tables, whole, findings)
    _check_spread(tables, findings)
    _check_records(tables, whole, "wait", findings)
    _check_wait_events(tables, findings)
    _check_records(tables, whole, "trigger", findings)
    _check_trigger_events(tables, findings)


def _check_copies(tables: ProgramTables, rank: int, descs: Descriptors, findings: Findings) -> None:
    """All descriptors of a spread task are the same bytes."""
    number = tables.task_of[rank]
    first = tables.descriptor_of[rank][number - tables.first_task[rank]]
    copies = np.flatnonzero(first != np.arange(len(descs)))
    raw = descs.view(np.uint8).reshape(len(descs), descs.itemsize)
    differ = (raw[copies] != raw[first[copies]]).any(axis=1)
    for task in np.unique(number[copies[differ]]):
        findings.add("spread", f"{tables.describe_task(int(task))} is not the same for all workers")


def _check_queues(tables: ProgramTables, rank: int, descs: Descriptors, findings: Findings) -> None:
    """Every descriptor is in one queue or in the launch list of the schedulers, as its launch kind says."""
    part, count = tables.ranks[rank], len(descs)
    queued = np.zeros(count, np.int64)
    for worker, queue in enumerate(part.queues):
        if queue.begin + queue.count > count:
            text = f"tasks {queue.begin} to {queue.begin + queue.count} of {count}"
            findings.add("queue", f"rank {rank} worker {worker}: {text}")
        begin, end = queue_range(queue, count)
        if end - begin > MAX_QUEUE:
            findings.add("queue", f"rank {rank} worker {worker} has {end - begin} tasks, over {MAX_QUEUE}")
        queued[begin:end] += 1
    launches = as_array(part.launches, ctypes.c_uint32).astype(np.int64)
    for descriptor in launches[launches >= count]:
        findings.add("launch", f"rank {rank} dispatches task {descriptor} of {count}")
    launched = np.bincount(launches[launches < count], minlength=count)
    ahead = np.isin(descs["launch"], LISTED)
    for times, wanted, where in ((queued, ahead, "queues"), (launched, ~ahead, "launch lists")):
        for descriptor in np.flatnonzero(times != wanted):
            text = f"is in {times[descriptor]} {where}, expected {int(wanted[descriptor])}"
            findings.add("queue", f"{tables.describe_task(int(tables.task_of[rank][descriptor]))} {text}")


def _check_tasks(tables: ProgramTables, findings: Findings) -> None:
    """Check task types, launch kinds and numbers of instances."""
    tasks = tables.tasks
    for task in np.flatnonzero(~np.isin(tasks.type, list(TASK_TYPES))):
        findings.add("task", f"{tables.describe_task(int(task))} is of unknown type {tasks.type[task]}")
    for task in np.flatnonzero(tasks.launch > max(LaunchKind)):
        findings.add("task", f"{tables.describe_task(int(task))} has unknown launch kind {tasks.launch[task]}")
    scheduled = np.flatnonzero(tasks.launch == LaunchKind.SCHEDULER)
    for task in scheduled:
        if tasks.rank[task] != 0 or len(scheduled) > 1 or tasks.type[task] != SchedulerStep.type_id:
            text = "is run by a scheduler: only one task of rank 0 may be, its scheduler step"
            findings.add("task", f"{tables.describe_task(int(task))} {text}")
    massive = tasks.launch == LaunchKind.MASSIVE
    # A task that is neither massive nor spread runs as one instance, even if its type could have many.
    single = ~massive & ~tasks.spread
    wrong = (tasks.max_instances < 1) | (massive & (tasks.max_instances * tables.num_schedulers > MAX_FIRINGS))
    for task in np.flatnonzero(wrong | (single & (tasks.max_instances != 1))):
        findings.add("task", f"{tables.describe_task(int(task))} has {tasks.max_instances[task]} instances")


def _check_pipeline(tables: ProgramTables, findings: Findings) -> None:
    """If the body of a task uses the pipeline's memory, no task of its rank streams data into the pipeline."""
    users: dict[int, int] = {}  # by rank: a task
    streaming: dict[int, int] = {}
    for rank, part in enumerate(tables.ranks):
        for task, index in enumerate(tables.descriptor_of[rank].tolist(), int(tables.first_task[rank])):
            desc = part.tasks[index]
            kind = TASK_TYPES.get(desc.type)
            if kind is None:
                continue
            if kind.uses_pipeline:
                users.setdefault(rank, task)
            elif kind.streams(decode_args(desc)):
                streaming.setdefault(rank, task)
    for rank in users.keys() & streaming.keys():
        text = f"uses the memory of the pipeline, into which {tables.describe_task(streaming[rank])} streams"
        findings.add("pipeline", f"{tables.describe_task(users[rank])} {text}")


def _check_padding(tables: ProgramTables, whole: list[Descriptors], findings: Findings) -> None:
    """Argument bytes that the task's type does not use are zero."""
    unused = {type_id: _unused_bytes(kind) for type_id, kind in TASK_TYPES.items()}
    for rank, descs in enumerate(whole):
        args = descs["args"].reshape(len(descs), TASK_ARGS_BYTES)
        for type_id in np.unique(descs["type"]).tolist():
            there = np.flatnonzero(descs["type"] == type_id)
            for index in there[(args[there][:, unused.get(type_id, [])] != 0).any(axis=1)]:
                text = "has arguments where its type has none"
                findings.add("task", f"{tables.describe_task(int(tables.task_of[rank][index]))} {text}")


def _unused_bytes(kind: type[Task]) -> list[int]:
    used = set[int]()
    for name, field, *_ in kind.Args._fields_:
        if name not in ("pad", "reserved"):
            begin = getattr(kind.Args, name).offset
            used |= {*range(begin, begin + ctypes.sizeof(field))}
    return [index for index in range(TASK_ARGS_BYTES) if index not in used]


def _check_spread(tables: ProgramTables, findings: Findings) -> None:
    """Every worker has each spread task once, and together they can run all of its instances."""
    tasks, num_workers = tables.tasks, tables.num_workers
    spread = np.flatnonzero(tasks.spread)
    times = np.zeros((len(spread), num_workers), np.int64)
    for index, queue in enumerate(tables.queues):
        rows: Ints = np.searchsorted(spread, queue[tasks.spread[queue]]).astype(np.int64)
        np.add.at(times[:, index % num_workers], rows, 1)
    for row, worker in np.argwhere(times != 1):
        text = f"is in the queue of worker {worker} {times[row, worker]} times, expected once"
        findings.add("spread", f"{tables.describe_task(int(spread[row]))} {text}")
    for task in spread.tolist():
        if tasks.first_worker[task] >= num_workers:
            text = f"begins at worker {tasks.first_worker[task]} of {num_workers}"
            findings.add("spread", f"{tables.describe_task(task)} {text}")
        kind = TASK_TYPES.get(int(tasks.type[task]), Task)
        if tasks.max_instances[task] > num_workers and not kind.loops_over_instances:
            text = f"has {tasks.max_instances[task]} instances for {num_workers} workers, and its body runs one"
            findings.add("spread", f"{tables.describe_task(task)} {text}")
        if kind.streams_weights:
            findings.add("spread", f"{tables.describe_task(task)} streams weights, which a spread task must not")


def _check_records(tables: ProgramTables, whole: list[Descriptors], what: str, findings: Findings) -> None:
    """Every task's waits (or triggers) lie in the table of its rank, and no two tasks share any."""
    for rank, part in enumerate(tables.ranks):
        descs, num_records = whole[rank][tables.descriptor_of[rank]], len(getattr(part, f"{what}s"))
        begin, count = (descs[name].astype(np.int64) for name in (f"{what}_begin", f"num_{what}s"))
        for index in np.flatnonzero(begin + count > num_records):
            text = f"has {what}s {begin[index]} to {begin[index] + count[index]} of {num_records}"
            findings.add("section", f"{tables.describe_task(int(tables.first_task[rank] + index))} {text}")
        if count.sum() > num_records:
            text = f"tasks share {what}s: they have {count.sum()}, the table has {num_records}"
            findings.add("section", f"rank {rank}: {text}")


def _check_wait_events(tables: ProgramTables, findings: Findings) -> None:
    waits, num_events = tables.waits, np.diff(tables.first_event)
    records = np.concatenate([as_array(part.waits, Wait) for part in tables.ranks])
    for index in np.flatnonzero(waits.event < 0):
        task = int(waits.task[index])
        text = f"waits for event {records['event'][waits.record[index]]} of {num_events[tables.tasks.rank[task]]}"
        findings.add("event", f"{tables.describe_task(task)} {text}")


def _check_trigger_events(tables: ProgramTables, findings: Findings) -> None:
    triggers = tables.triggers
    records = np.concatenate([as_array(part.triggers, Trigger) for part in tables.ranks])
    for index in np.flatnonzero(triggers.event < 0):
        record = records[triggers.record[index]]
        text = f"triggers event {record['event']} of rank {record['rank']}, which is not there"
        findings.add("event", f"{tables.describe_task(int(triggers.task[index]))} {text}")
