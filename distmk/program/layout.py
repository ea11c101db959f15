"""Where everything lives: heap offsets, equal on every rank, and offsets in each rank's own arena."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from distmk.abi import EVENT_STRIDE_BYTES, LISTED, Control, JitEntry, JitRing, Space, operand
from distmk.graph.graph import Graph
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Slab, Weight

ALIGN_BYTES = 256


@dataclass(frozen=True)
class Placed:
    """A named piece of memory: `rows` of `row_bytes` at `offset` in the heap of every rank or in one rank's arena."""

    name: str
    space: Space
    rank: int  # -1: the same on every rank
    offset: int
    rows: int
    row_bytes: int
    read_only: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Placement:
    """The layout of a program's memory; implements `tasks.Layout`."""

    pieces: tuple[Placed, ...]
    buffers: dict[Buffer, Placed]
    weights: dict[Weight, Placed]
    events_heap_offset: int
    rings_heap_offset: int
    jit_capacity: int
    zeroed_heap_bytes: int  # control block, events, rings and buffers of what arrives, zeroed before a launch
    heap_bytes: int
    local_bytes: tuple[int, ...]

    def operand(self, ref: Region | Slab | Weight | None) -> int:
        if ref is None:
            return 0
        if isinstance(ref, Region):
            placed = self.buffers[ref.buffer]
            return operand(placed.space, placed.offset + ref.begin * ITEM_BYTES[ref.buffer.dtype])
        if isinstance(ref, Slab):
            return operand(Space.LOCAL, self.weights[ref.weight].offset + ref.row_begin * ref.weight.row_bytes)
        return operand(Space.LOCAL, self.weights[ref].offset)


def align(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _ring_capacity(graph: Graph) -> int:
    """Entries of a worker's ring: what its share of the largest launch needs, within reason (a full ring only delays)."""
    handed_out = (task for task in graph.tasks if task.launch not in LISTED)
    largest = max((task.max_instances() for task in handed_out), default=1)
    share = min(-(-largest // graph.num_workers), 256)
    return 1 << max(2, (share - 1).bit_length())


def place(graph: Graph, num_events: int) -> Placement:
    """Lay out `graph` with `num_events` counters a rank."""
    pieces: list[Placed] = []
    buffers: dict[Buffer, Placed] = {}
    weights: dict[Weight, Placed] = {}
    capacity = _ring_capacity(graph)
    events_offset = align(ctypes.sizeof(Control))
    rings_offset = align(events_offset + num_events * EVENT_STRIDE_BYTES)
    ring_bytes = ctypes.sizeof(JitRing) + capacity * ctypes.sizeof(JitEntry)
    heap = cleared = align(rings_offset + graph.num_workers * ring_bytes)
    local = ALIGN_BYTES  # an operand of zero means "none"
    for buffer in sorted(graph.buffers, key=lambda buffer: not buffer.lamport):
        offset = heap if buffer.space is Space.HEAP else local
        buffers[buffer] = Placed(buffer.name, buffer.space, -1, offset, buffer.rows, buffer.row_bytes)
        pieces.append(buffers[buffer])
        if buffer.space is Space.HEAP:
            heap = align(heap + buffer.num_bytes)
            cleared = heap if buffer.lamport else cleared
        else:
            local = align(local + buffer.num_bytes)
    local_ends = [local] * graph.num_ranks
    for weight in graph.weights:
        offset = local_ends[weight.rank]
        placed = Placed(weight.name, Space.LOCAL, weight.rank, offset, weight.rows, weight.row_bytes, read_only=True)
        weights[weight] = placed
        pieces.append(placed)
        local_ends[weight.rank] = align(offset + weight.num_bytes)
    return Placement(
        tuple(pieces), buffers, weights, events_offset, rings_offset, capacity, cleared, heap, tuple(local_ends)
    )
