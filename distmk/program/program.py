"""A program: everything a launch needs, as bytes. Made from a graph by `compile_graph`, read by `check` and the backends."""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmk import abi
from distmk.abi import LaunchKind, ProgramHeader, Queue, TaskDesc, Trigger, Wait
from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph
from distmk.program.layout import Placement, place
from distmk.sync.events import Wiring, derive
from distmk.tasks import TASK_TYPES, SchedulerStep, Task
from distmk.tasks.abi_header import abi_hash


@dataclass
class RankProgram:
    """One rank's part: the arrays that `to_bytes` lays end to end behind the header.

    `task_names[i]` and `event_names[e]` are for people; descriptors of a worker's queue are consecutive, and those of a
    spread task share its waits and triggers.
    """

    header: ProgramHeader
    tasks: Any  # ctypes arrays of TaskDesc, Wait, Trigger, Queue and c_uint32
    waits: Any
    triggers: Any
    queues: Any
    launches: Any
    task_names: list[str]
    event_names: list[str]
    weight_bytes: int

    def to_bytes(self) -> bytes:
        return b"".join(
            bytes(part) for part in (self.header, self.tasks, self.waits, self.triggers, self.queues, self.launches)
        )

    def digest(self) -> str:
        """A hash of these bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


@dataclass
class Program:
    """All ranks' programs and the memory they share."""

    ranks: Sequence[RankProgram]
    placement: Placement

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def fingerprint(self) -> str:
        """A hash of every rank's bytes: equal where ranks compiled the same program."""
        return join_digests([part.digest() for part in self.ranks])


def join_digests(digests: Sequence[str]) -> str:
    """The fingerprint of a program whose ranks have these."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


@no_collection()
def compile_graph(graph: Graph) -> Program:
    """Graph -> events -> places -> program; UsageError for a graph without tasks."""
    wiring = derive(graph)
    placement = place(graph, max(1, max(len(events) for events in wiring.events)))
    by_rank: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(graph.tasks):
        by_rank[task.rank].append(index)
    ranks = [_assemble(graph, wiring, placement, rank, by_rank[rank]) for rank in range(graph.num_ranks)]
    return Program(ranks, placement)


def _assemble(graph: Graph, wiring: Wiring, placement: Placement, rank: int, indices: list[int]) -> RankProgram:
    queued, handed_out = _deal(graph, indices)
    order = [index for queue in queued for index in queue] + handed_out
    queues, begin = (Queue * graph.num_workers)(), 0
    for worker, queue in enumerate(queued):
        queues[worker] = Queue(begin, len(queue))
        begin += len(queue)
    launches = (ctypes.c_uint32 * len(handed_out))(*range(begin, len(order)))
    once = dict.fromkeys(order)
    waits = [
        Wait(event.index, event.count, lag, event.spans_ranks) for index in once for event, lag in wiring.waits[index]
    ]
    triggers = [
        Trigger(event.index, event.rank, 1, event.spans_ranks) for index in once for event in wiring.triggers[index]
    ]
    part = RankProgram(
        header=ProgramHeader(),
        tasks=_descriptors(graph, wiring, placement, order),
        waits=(Wait * len(waits))(*waits),
        triggers=(Trigger * len(triggers))(*triggers),
        queues=queues,
        launches=launches,
        task_names=[graph.tasks[index].op for index in order],
        event_names=[_event_name(graph, event.producers) for event in wiring.events[rank]],
        weight_bytes=sum(graph.tasks[index].weight_bytes() for index in indices),
    )
    _fill_header(part, graph, wiring, placement, rank)
    return part


def _deal(graph: Graph, indices: list[int]) -> tuple[list[list[int]], list[int]]:
    """The tasks in every worker's list, and those that schedulers deal with, in program order."""
    queued: list[list[int]] = [[] for _ in range(graph.num_workers)]
    handed_out: list[int] = []
    for index in indices:
        task = graph.tasks[index]
        if task.launch is LaunchKind.SPREAD:
            for queue in queued:
                queue.append(index)
        elif task.launch is LaunchKind.AHEAD and task.worker is not None:
            queued[task.worker].append(index)
        else:
            handed_out.append(index)
    return queued, handed_out


def _descriptors(graph: Graph, wiring: Wiring, placement: Placement, order: list[int]) -> ctypes.Array[TaskDesc]:
    """Descriptors of the tasks `order`; those of a spread task, which is in it once a worker, are the same bytes."""
    descs = (TaskDesc * len(order))()
    spread: dict[int, TaskDesc] = {}
    wait_begin = trigger_begin = 0
    for number, index in enumerate(order):
        if index in spread:
            descs[number] = spread[index]
            continue
        desc, task = descs[number], graph.tasks[index]
        _describe(desc, task, placement, index)
        desc.num_waits, desc.num_triggers = len(wiring.waits[index]), len(wiring.triggers[index])
        desc.wait_begin, desc.trigger_begin = wait_begin, trigger_begin
        wait_begin += desc.num_waits
        trigger_begin += desc.num_triggers
        if task.launch is LaunchKind.SPREAD:
            # All begin at the same worker: what it works out for one of them is as good for the next.
            desc.first_worker = 0
            spread[index] = desc
    return descs


def _describe(desc: TaskDesc, task: Task, placement: Placement, order: int) -> None:
    desc.type, desc.launch, desc.order = task.type_id, int(task.launch), order
    desc.max_instances, desc.deep_lookahead = task.max_instances(), task.deep_lookahead
    args = task.encode(placement)
    ctypes.memmove(ctypes.addressof(desc) + TaskDesc.args.offset, ctypes.addressof(args), ctypes.sizeof(args))


def _event_name(graph: Graph, producers: tuple[int, ...]) -> str:
    ops = sorted({graph.tasks[p].op for p in producers})
    return f"{'+'.join(ops[:2])}{'+...' if len(ops) > 2 else ''} done" + (
        f" x{len(producers)}" if len(producers) > 1 else ""
    )


def _fill_header(part: RankProgram, graph: Graph, wiring: Wiring, placement: Placement, rank: int) -> None:
    header = part.header
    header.magic, header.abi_hash = abi.MAGIC, abi_hash()
    header.rank, header.num_ranks, header.num_workers = rank, graph.num_ranks, graph.num_workers
    header.num_schedulers = graph.num_schedulers or 1
    header.num_tasks, header.num_events = len(part.tasks), len(wiring.events[rank])
    header.num_waits, header.num_triggers, header.num_launches = len(part.waits), len(part.triggers), len(part.launches)
    header.jit_capacity = placement.jit_capacity
    header.iteration_event = wiring.gates[rank].index if wiring.gates else abi.NO_EVENT
    prepare = next((task for task in graph.tasks if isinstance(task, SchedulerStep)), None)
    header.iteration_batch = placement.operand(prepare.batch) if prepare else 0
    offset = ctypes.sizeof(ProgramHeader)
    for name in ("tasks", "waits", "triggers", "queues", "launches"):
        setattr(header, f"{name}_offset", offset)
        offset += ctypes.sizeof(getattr(part, name))
    header.program_bytes = offset
    header.events_heap_offset, header.rings_heap_offset = placement.events_heap_offset, placement.rings_heap_offset
    header.zeroed_heap_bytes, header.heap_bytes = placement.zeroed_heap_bytes, placement.heap_bytes
    header.local_bytes = placement.local_bytes[rank]


def decode_args(desc: TaskDesc) -> Any:
    """The argument struct inside a descriptor (shares its memory)."""
    return TASK_TYPES[desc.type].Args.from_buffer(desc, TaskDesc.args.offset)
