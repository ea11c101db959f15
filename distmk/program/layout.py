"""Memory layout: offsets on the symmetric heap, which are the same on every rank, and in each rank's own arena."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from distmk.abi import EVENT_STRIDE_BYTES, LISTED, Control, JitEntry, JitRing, Space, operand
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Slab, Weight

ALIGN_BYTES = 256
MAX_RING_ENTRIES = 256
# The numbers of the layout that every rank's header repeats.
HEADER_FIELDS = ("events_heap_offset", "rings_heap_offset", "jit_capacity", "zeroed_heap_bytes", "heap_bytes")


@dataclass(frozen=True)
class Placed:
    """An allocation: `rows` of `row_bytes` at `offset` on the heap of every rank, or in the arena of one or every rank."""

    name: str
    space: Space
    rank: int  # -1: on every rank, at the same offset
    offset: int
    rows: int
    row_bytes: int
    read_only: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Placement:
    """The memory layout of a program; implements `tasks.Layout`."""

    pieces: tuple[Placed, ...]
    buffers: dict[Buffer, Placed]
    weights: dict[Weight, Placed]
    events_heap_offset: int
    rings_heap_offset: int
    jit_capacity: int  # entries of a worker's just-in-time ring, a power of two
    zeroed_heap_bytes: int  # control block, events, rings and Lamport buffers: zeroed before a launch
    heap_bytes: int
    local_bytes: tuple[int, ...]  # by rank

    def operand(self, ref: Region | Slab | Weight | None) -> int:
        """The operand (abi) of the first byte of a region, slab or weight; 0 for None.

        UsageError: it belongs to another graph.
        """
        try:
            return 0 if ref is None else self._operand(ref)
        except KeyError:
            name = ref if isinstance(ref, Region) else (ref.weight if isinstance(ref, Slab) else ref).name  # type: ignore[union-attr]
            raise UsageError(f"{name} is of another graph; take what this graph's methods return") from None

    def _operand(self, ref: Region | Slab | Weight) -> int:
        if isinstance(ref, Region):
            buffer = self.buffers[ref.buffer]
            return operand(buffer.space, buffer.offset + ref.begin * ITEM_BYTES[ref.buffer.dtype])
        if isinstance(ref, Slab):
            return operand(Space.LOCAL, self.weights[ref.weight].offset + ref.weight.offset_of(ref.row_begin))
        return operand(Space.LOCAL, self.weights[ref].offset)


def align(offset: int) -> int:
    """`offset` rounded up to a multiple of ALIGN_BYTES."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _ring_capacity(graph: Graph) -> int:
    """Entries of a worker's just-in-time ring: its instances of the largest launch, rounded up to a power of two.

    The number is at most MAX_RING_ENTRIES; a full ring only delays its scheduler.
    """
    dispatched = (task for task in graph.tasks if task.launch not in LISTED)
    largest = max((task.max_instances() for task in dispatched), default=1)
    num_entries = min(-(-largest // graph.num_workers), MAX_RING_ENTRIES)
    return 1 << max(2, (num_entries - 1).bit_length())


def place(graphs: Sequence[Graph], num_events: Sequence[int]) -> tuple[Placement, ...]:
    """Lay out the graphs of all row buckets. `num_events`: event counters per rank, by graph. Lamport buffers come first.

    A buffer or weight that several graphs have is one piece of memory. Each program has its own events and rings.
    """
    arena = _Arena(graphs[0].num_ranks)
    arena.heap = align(ctypes.sizeof(Control))
    protocol = []
    for graph, events in zip(graphs, num_events, strict=True):
        capacity = _ring_capacity(graph)
        ring_bytes = ctypes.sizeof(JitRing) + capacity * ctypes.sizeof(JitEntry)
        events_offset = arena.take_heap(events * EVENT_STRIDE_BYTES)
        protocol.append((events_offset, arena.take_heap(graph.num_workers * ring_bytes), capacity))
    every = list(dict.fromkeys(buffer for graph in graphs for buffer in graph.buffers))
    for buffer in filter(lambda buffer: buffer.lamport, every):
        arena.place_buffer(buffer)
    zeroed = arena.heap
    for buffer in filter(lambda buffer: not buffer.lamport, every):
        arena.place_buffer(buffer)
    arena.local_ends = [arena.local] * graphs[0].num_ranks
    for weight in dict.fromkeys(weight for graph in graphs for weight in graph.weights):
        arena.place_weight(weight)
    placements = []
    for graph, (events_offset, rings_offset, capacity) in zip(graphs, protocol, strict=True):
        buffers = {buffer: arena.buffers[buffer] for buffer in graph.buffers}
        weights = {weight: arena.weights[weight] for weight in graph.weights}
        pieces = (*buffers.values(), *weights.values())
        ends = (events_offset, rings_offset, capacity, zeroed, arena.heap, tuple(arena.local_ends))
        placements.append(Placement(pieces, buffers, weights, *ends))
    return tuple(placements)


class _Arena:
    """Memory that is given out from its beginning: the symmetric heap, and each rank's own arena."""

    def __init__(self, num_ranks: int) -> None:
        self.heap = 0
        self.local = ALIGN_BYTES  # an operand of 0 means "none"
        self.local_ends = [self.local] * num_ranks
        self.buffers: dict[Buffer, Placed] = {}
        self.weights: dict[Weight, Placed] = {}

    def take_heap(self, num_bytes: int) -> int:
        offset = self.heap
        self.heap = align(offset + num_bytes)
        return offset

    def place_buffer(self, buffer: Buffer) -> None:
        offset = self.heap if buffer.space is Space.HEAP else self.local
        self.buffers[buffer] = Placed(buffer.name, buffer.space, -1, offset, buffer.rows, buffer.row_bytes)
        if buffer.space is Space.HEAP:
            self.take_heap(buffer.num_bytes)
        else:
            self.local = align(offset + buffer.num_bytes)

    def place_weight(self, weight: Weight) -> None:
        offset = self.local_ends[weight.rank]
        self.weights[weight] = Placed(weight.name, Space.LOCAL, weight.rank, offset, *weight.extent, read_only=True)
        self.local_ends[weight.rank] = align(offset + weight.num_bytes)
