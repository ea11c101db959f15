"""Allocations lie inside their rank's memory and do not overlap, and launches zero all memory that the protocol needs
zeroed.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

from distmk.abi import EVENT_STRIDE_BYTES, Control, JitEntry, JitRing, Space
from distmk.check.findings import Findings
from distmk.program.layout import ALIGN_BYTES, Placed
from distmk.program.reader import ProgramTables


class Allocations:
    """The valid allocations of a program, found by address.

    A location is an allocation on one rank, as a number: index in `every` * num_ranks + rank.
    """

    def __init__(self, tables: ProgramTables, findings: Findings) -> None:
        self.every, self.num_ranks = tables.program.placement.pieces, tables.num_ranks
        sound = [index for index, each in enumerate(self.every) if _is_sound(each, tables.num_ranks, findings)]
        # For each space and rank: sorted offsets, and the allocation at each offset.
        self._memories: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for rank, part in enumerate(tables.ranks):
            for space in (Space.HEAP, Space.LOCAL):
                here = [i for i in sound if self.every[i].space == space and self.every[i].rank in (-1, rank)]
                here.sort(key=lambda i: self.every[i].offset)
                self._memories[(int(space), rank)] = ([self.every[i].offset for i in here], here)
                _check_apart(space, rank, part.header, [self.every[i] for i in here], tables, findings)
        _check_zeroed(tables, findings)

    def find(self, space: int, rank: int, offset: int) -> int:
        """The last allocation that begins at or before `offset`; -1: none does."""
        offsets, indices = self._memories.get((space, rank), ([], []))
        at = bisect_right(offsets, offset) - 1
        return indices[at] if at >= 0 else -1

    def describe(self, location: int) -> tuple[str, int]:
        """Name and rank of a location."""
        index, rank = divmod(location, self.num_ranks)
        return self.every[index].name, rank


def _is_sound(piece: Placed, num_ranks: int, findings: Findings) -> bool:
    sound = (
        piece.space in (Space.HEAP, Space.LOCAL)
        and -1 <= piece.rank < num_ranks
        and (piece.rank == -1 or piece.space == Space.LOCAL)
        and piece.offset >= 0
        and piece.offset % ALIGN_BYTES == 0
        and piece.rows >= 1
        and piece.row_bytes >= 1
    )
    if not sound:
        findings.add("bounds", f"buffer {piece.name} has no valid memory: {piece}")
    return sound


Areas = list[tuple[int, int, str]]  # offset, bytes, name


def protocol_areas(tables: ProgramTables) -> Areas:
    """The areas of the heap in front of the buffers: control block, events and rings."""
    headers = [part.header for part in tables.ranks]
    ring_bytes = ctypes.sizeof(JitRing) + headers[0].jit_capacity * ctypes.sizeof(JitEntry)
    num_events = max(header.num_events for header in headers)
    return [
        (0, ctypes.sizeof(Control), "the control block"),
        (headers[0].events_heap_offset, num_events * EVENT_STRIDE_BYTES, "the events"),
        (headers[0].rings_heap_offset, headers[0].num_workers * ring_bytes, "the rings"),
    ]


def _check_zeroed(tables: ProgramTables, findings: Findings) -> None:
    zeroed = tables.ranks[0].header.zeroed_heap_bytes
    for offset, num_bytes, name in protocol_areas(tables):
        if offset % 8:
            findings.add("bounds", f"{name} at {offset} of the heap: not aligned to 8 bytes")
        if offset + num_bytes > zeroed:
            text = f"{name} end at {offset + num_bytes} of the heap, of which a launch zeroes {zeroed} bytes"
            findings.add("bounds", text)
    for rank, part in enumerate(tables.ranks):
        if zeroed > part.header.heap_bytes:
            text = f"a launch zeroes {zeroed} bytes of a heap of {part.header.heap_bytes} on rank {rank}"
            findings.add("bounds", text)


def _check_apart(
    space: Space, rank: int, header: Any, pieces: list[Placed], tables: ProgramTables, findings: Findings
) -> None:
    """Areas of one memory lie inside it and do not overlap."""
    on_heap = space == Space.HEAP
    size, where = (
        header.heap_bytes if on_heap else header.local_bytes,
        f"the {space.name.lower()} memory of rank {rank}",
    )
    areas = [(p.offset, p.num_bytes, f"buffer {p.name}") for p in pieces]
    reach, holder = 0, ""
    for offset, num_bytes, name in sorted([*(protocol_areas(tables) if on_heap else []), *areas]):
        if offset + num_bytes > size:
            text = f"{name}: bytes {offset} to {offset + num_bytes} of {where}, which has {size}"
            findings.add("bounds", text)
        if num_bytes and offset < reach:
            text = f"{name} begins at {offset} of {where}, inside {holder}, which ends at {reach}"
            findings.add("overlap", text)
        if offset + num_bytes > reach:
            reach, holder = offset + num_bytes, name
