"""Memory layout: offsets on the symmetric heap, the same on every rank, and in each rank's own arena."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from distmk.abi import EVENT_STRIDE_BYTES, LISTED, Control, JitEntry, JitRing, Space, operand
from distmk.graph.graph import Graph
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Slab, Weight

ALIGN_BYTES = 256
MAX_RING_ENTRIES = 256
# What every rank's header repeats of the layout.
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
        """The operand (abi) of the first byte of a region, slab or weight; 0 for None."""
        if ref is None:
            return 0
        if isinstance(ref, Region):
            buffer = self.buffers[ref.buffer]
            return operand(buffer.space, buffer.offset + ref.begin * ITEM_BYTES[ref.buffer.dtype])
        if isinstance(ref, Slab):
            return operand(Space.LOCAL, self.weights[ref.weight].offset + ref.row_begin * ref.weight.row_bytes)
        return operand(Space.LOCAL, self.weights[ref].offset)


def align(offset: int) -> int:
    """`offset` rounded up to a multiple of ALIGN_BYTES."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _ring_capacity(graph: Graph) -> int:
    """Entries of a worker's just-in-time ring: its instances of the largest launch, at most MAX_RING_ENTRIES, rounded up to a
    power of two. A full ring only delays its scheduler.
    """
    dispatched = (task for task in graph.tasks if task.launch not in LISTED)
    largest = max((task.max_instances() for task in dispatched), default=1)
    num_entries = min(-(-largest // graph.num_workers), MAX_RING_ENTRIES)
    return 1 << max(2, (num_entries - 1).bit_length())


def place(graph: Graph, num_events: int) -> Placement:
    """Lay out the buffers and weights of `graph`, and `num_events` counters a rank. Lamport buffers come first."""
    pieces: list[Placed] = []
    buffers: dict[Buffer, Placed] = {}
    weights: dict[Weight, Placed] = {}
    capacity = _ring_capacity(graph)
    events_offset = align(ctypes.sizeof(Control))
    rings_offset = align(events_offset + num_events * EVENT_STRIDE_BYTES)
    ring_bytes = ctypes.sizeof(JitRing) + capacity * ctypes.sizeof(JitEntry)
    heap = zeroed = align(rings_offset + graph.num_workers * ring_bytes)
    local = ALIGN_BYTES  # an operand of 0 means "none"
    for buffer in sorted(graph.buffers, key=lambda buffer: not buffer.lamport):
        offset = heap if buffer.space is Space.HEAP else local
        buffers[buffer] = Placed(buffer.name, buffer.space, -1, offset, buffer.rows, buffer.row_bytes)
        pieces.append(buffers[buffer])
        if buffer.space is Space.HEAP:
            heap = align(heap + buffer.num_bytes)
            zeroed = heap if buffer.lamport else zeroed
        else:
            local = align(local + buffer.num_bytes)
    local_ends = [local] * graph.num_ranks
    for weight in graph.weights:
        offset = local_ends[weight.rank]
        weights[weight] = Placed(
            weight.name, Space.LOCAL, weight.rank, offset, weight.rows, weight.row_bytes, read_only=True
        )
        pieces.append(weights[weight])
        local_ends[weight.rank] = align(offset + weight.num_bytes)
    return Placement(
        tuple(pieces), buffers, weights, events_offset, rings_offset, capacity, zeroed, heap, tuple(local_ends)
    )
