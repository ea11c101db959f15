"""A program: everything that a launch needs, as bytes. `compile_graph` makes it from a graph; `reader` decodes it."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distmk import abi
from distmk.abi import LaunchKind, ProgramHeader, Queue, TaskDesc, Trigger, Wait
from distmk.errors import UsageError, one_line
from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph
from distmk.program.layout import HEADER_FIELDS, Placement, place
from distmk.sync.events import Wiring, derive
from distmk.tasks import TASK_TYPES, SchedulerStep, Task
from distmk.tasks.abi_header import abi_hash
from distmk.tasks.own_types import find_types, types_for


class Section(NamedTuple):
    """An array of `struct` after the header. The header gives its length in `count_field` and its place in `<name>_offset`."""

    name: str
    struct: Any
    count_field: str


SECTIONS = (
    Section("tasks", TaskDesc, "num_tasks"),
    Section("waits", Wait, "num_waits"),
    Section("triggers", Trigger, "num_triggers"),
    Section("queues", Queue, "num_workers"),
    Section("launches", ctypes.c_uint32, "num_launches"),
)
"""In the order in which they follow the header, without gaps."""


@dataclass
class RankProgram:
    """One rank's part: header and sections, as ctypes structures and arrays.

    Descriptors of a worker's queue are consecutive. A spread task has a descriptor in every queue; these share its
    waits and triggers. In messages and traces, `task_names[i]` is the operator of descriptor i, and `event_names[e]`
    names event e. `own_types`: the registered types (`tasks.own_types`) of the runtime that runs the program, the same
    on all ranks.
    """

    header: ProgramHeader
    tasks: Any
    waits: Any
    triggers: Any
    queues: Any
    launches: Any
    task_names: list[str]
    event_names: list[str]
    weight_bytes: int  # weights streamed in a step
    own_types: tuple[str, ...] = ()

    @property
    def has_packed_weights(self) -> bool:
        """Whether GPUs need the kernel for packed weights."""
        return any(TASK_TYPES[desc.type].needs_packed_kernel(decode_args(desc)) for desc in self.tasks)

    def to_bytes(self) -> bytes:
        """The program as the device reads it: the header, then the sections."""
        return b"".join([bytes(self.header), *(bytes(getattr(self, section.name)) for section in SECTIONS)])

    def digest(self) -> str:
        """sha256 of `to_bytes`, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


@dataclass
class Program:
    """All ranks' programs and the memory layout.

    others: the programs of the launch's other row buckets; the launch begins with this one. They have the same ranks
    and workers, and share one memory layout.
    """

    ranks: Sequence[RankProgram]
    placement: Placement
    others: tuple[Program, ...] = ()

    @property
    def every(self) -> tuple[Program, ...]:
        """All programs of the launch, in the order of their numbers."""
        return (self, *self.others)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """For each host, the number of its consecutive ranks, which share memory."""
        return tuple(Counter(part.header.host for part in self.ranks).values())

    def fingerprint(self) -> str:
        """sha256 over every rank's bytes, in hex: equal on ranks that compiled the same program."""
        return join_digests([part.digest() for program in self.every for part in program.ranks])


def join_digests(digests: Sequence[str]) -> str:
    """The fingerprint of a program whose ranks have these digests."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


@no_collection()
def compile_graph(*graphs: Graph) -> Program:
    """Graph -> events -> memory layout -> program.

    Several graphs give the programs of several row buckets; the first one begins.

    UsageError: a graph cannot be ordered (`sync.events.derive`), or a task's arguments do not fit its type.
    """
    wirings = [derive(graph) for graph in graphs]
    placements = place(graphs, [max(1, *(len(events) for events in wiring.events)) for wiring in wirings])
    own_types = types_for(task for graph in graphs for task in graph.tasks)
    programs = [
        _compile(graph, wiring, placement, index, own_types)
        for index, (graph, wiring, placement) in enumerate(zip(graphs, wirings, placements, strict=True))
    ]
    return dataclasses.replace(programs[0], others=tuple(programs[1:]))


def _compile(graph: Graph, wiring: Wiring, placement: Placement, index: int, own_types: tuple[str, ...]) -> Program:
    by_rank: dict[int, list[int]] = defaultdict(list)
    for number, task in enumerate(graph.tasks):
        by_rank[task.rank].append(number)
    ranks = [_assemble(graph, wiring, placement, rank, by_rank[rank]) for rank in range(graph.num_ranks)]
    program_hash = abi_hash(find_types(own_types))
    for part in ranks:
        part.header.index, part.header.abi_hash, part.own_types = index, program_hash, own_types
    return Program(ranks, placement)


def _assemble(graph: Graph, wiring: Wiring, placement: Placement, rank: int, indices: list[int]) -> RankProgram:
    queued, dispatched = _partition(graph, indices)
    order = [index for queue in queued for index in queue] + dispatched
    queues, begin = (Queue * graph.num_workers)(), 0
    for worker, queue in enumerate(queued):
        queues[worker] = Queue(begin, len(queue))
        begin += len(queue)
    launches = (ctypes.c_uint32 * len(dispatched))(*range(begin, len(order)))
    distinct = dict.fromkeys(order)
    waits = [
        Wait(event.index, event.count, lag, event.spans_ranks)
        for index in distinct
        for event, lag in wiring.waits[index]
    ]
    triggers = [
        Trigger(event.index, event.rank, 1, event.spans_ranks) for index in distinct for event in wiring.triggers[index]
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


def _partition(graph: Graph, indices: list[int]) -> tuple[list[list[int]], list[int]]:
    """The tasks of every worker's queue, and the tasks that schedulers dispatch, in program order."""
    queued: list[list[int]] = [[] for _ in range(graph.num_workers)]
    dispatched: list[int] = []
    for index in indices:
        task = graph.tasks[index]
        if task.launch is LaunchKind.SPREAD:
            for queue in queued:
                queue.append(index)
        elif task.launch is LaunchKind.AHEAD and task.worker is not None:
            queued[task.worker].append(index)
        else:
            dispatched.append(index)
    return queued, dispatched


def _descriptors(graph: Graph, wiring: Wiring, placement: Placement, order: list[int]) -> ctypes.Array[TaskDesc]:
    """Descriptors of the tasks `order`. A spread task is there once for every worker, with the same bytes each time."""
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
            # All of them start with the same worker, so that its assignment for one also serves for the next.
            desc.first_worker = 0
            spread[index] = desc
    return descs


def _describe(desc: TaskDesc, task: Task, placement: Placement, order: int) -> None:
    desc.type, desc.launch, desc.order = task.type_id, int(task.launch), order
    desc.max_instances, desc.deep_lookahead = task.max_instances(), task.deep_lookahead
    try:
        args = task.encode(placement)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"task {task.op}: encode() of {type(task).__name__} fails: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not isinstance(args, task.Args):
        raise UsageError(f"task {task.op}: encode() of {type(task).__name__} returned no {task.Args.__name__}")
    ctypes.memmove(ctypes.addressof(desc) + TaskDesc.args.offset, ctypes.addressof(args), ctypes.sizeof(args))


def _event_name(graph: Graph, producers: tuple[int, ...]) -> str:
    ops = sorted({graph.tasks[p].op for p in producers})
    return f"{'+'.join(ops[:2])}{'+...' if len(ops) > 2 else ''} done" + (
        f" x{len(producers)}" if len(producers) > 1 else ""
    )


def _fill_header(part: RankProgram, graph: Graph, wiring: Wiring, placement: Placement, rank: int) -> None:
    header = part.header
    header.magic = abi.MAGIC
    header.rank, header.num_ranks, header.num_workers = rank, graph.num_ranks, graph.num_workers
    header.host = next(host for host, ranks in enumerate(graph.hosts) if rank in ranks)
    header.num_schedulers = graph.num_schedulers or 1
    header.num_events = len(wiring.events[rank])
    header.iteration_event = wiring.barriers[rank].index if wiring.barriers else abi.NO_EVENT
    step = next((task for task in graph.tasks if isinstance(task, SchedulerStep)), None)
    header.iteration_batch = placement.operand(step.batch) if step else 0
    offset = ctypes.sizeof(ProgramHeader)
    for section in SECTIONS:
        array = getattr(part, section.name)
        setattr(header, section.count_field, len(array))
        setattr(header, f"{section.name}_offset", offset)
        offset += ctypes.sizeof(array)
    header.program_bytes = offset
    for field in HEADER_FIELDS:
        setattr(header, field, getattr(placement, field))
    header.local_bytes = placement.local_bytes[rank]


def decode_args(desc: TaskDesc) -> Any:
    """The argument struct inside a descriptor, in the descriptor's memory."""
    return TASK_TYPES[desc.type].Args.from_buffer(desc, TaskDesc.args.offset)
