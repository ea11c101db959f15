"""The oracle's verdict on the layout: what lies beside what in memory, and which bytes a task touches."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

from support.oracle_lamport import Run
from support.simulation import Task

from distmk.abi import EVENT_STRIDE_BYTES, Control, JitEntry, JitRing, LaunchKind
from distmk.graph.task import CONSTANT
from distmk.program.program import Program, decode_args
from distmk.tasks import TASK_TYPES


class OracleLayout:
    """`runs`: the bytes that every task touches, except in read-only memory. `faults`: layout, bounds, spread."""

    def __init__(self, program: Program, tasks: dict[Task, Any], has_step: bool) -> None:
        self.program, self.ranks, self.has_step = program, program.ranks, has_step
        self.faults: set[str] = set()
        self.runs: dict[Task, list[Run]] = {}
        self._areas()
        for task, desc in tasks.items():
            self.runs[task] = list(self._runs_of(task, desc))
            if desc.launch == LaunchKind.SPREAD and any(run[0] and run[1] != task[0] for run in self.runs[task]):
                self.faults.add("spread")

    def _areas(self) -> None:
        """Pieces, and what lies beside them in the heap, do not overlap."""
        header = self.ranks[0].header
        ring_bytes = ctypes.sizeof(JitRing) + header.jit_capacity * ctypes.sizeof(JitEntry)
        num_events = max(part.header.num_events for part in self.ranks)
        for rank, part in enumerate(self.ranks):
            for space, size in ((1, part.header.heap_bytes), (2, part.header.local_bytes)):
                areas = [(p.offset, p.offset + p.num_bytes) for p in self._pieces(space, rank)]
                if space == 1:
                    areas.append((0, ctypes.sizeof(Control)))
                    begin = header.events_heap_offset
                    areas.append((begin, begin + num_events * EVENT_STRIDE_BYTES))
                    begin = header.rings_heap_offset
                    areas.append((begin, begin + header.num_workers * ring_bytes))
                    if any(end > header.zeroed_heap_bytes for _, end in areas[-3:]) or header.zeroed_heap_bytes > size:
                        self.faults.add("layout")
                areas.sort()
                pairs = itertools.pairwise(areas)
                if any(end > size for _, end in areas) or any(a[1] > b[0] for a, b in pairs):
                    self.faults.add("layout")

    def _pieces(self, space: int, rank: int) -> list[Any]:
        return [p for p in self.program.placement.pieces if p.space == space and p.rank in (-1, rank)]

    def _runs_of(self, task: Task, desc: Any) -> Iterator[Run]:
        """The runs of bytes that a task touches, except in read-only memory."""
        try:
            accesses = TASK_TYPES[desc.type].accesses(decode_args(desc), task[0], len(self.ranks))
        except ValueError:
            self.faults.add("bounds")
            return
        for access in accesses:
            pieces = self._pieces(access.space, access.rank)
            begins = [access.offset + row * access.stride for row in range(access.num_rows)]
            inside = [
                p
                for p in pieces
                if all(p.offset <= b and b + access.row_bytes <= p.offset + p.num_bytes for b in begins)
            ]
            if len(inside) != 1 or access.offset % access.align_bytes or not access.row_bytes:
                self.faults.add("bounds")
                continue
            piece = inside[0]
            if access.write and (piece.read_only or (access.space != 1 and access.rank != task[0])):
                self.faults.add("bounds")
            if piece.rows > 1 and not piece.read_only:  # columns, from the first row on
                column = access.offset - piece.offset
                fits = access.num_rows == 1 or access.stride == piece.row_bytes
                gapless = access.num_rows == 1 or access.stride == access.row_bytes
                whole = column == 0 and gapless and access.num_rows * access.row_bytes % piece.row_bytes == 0
                if not whole and (column + access.row_bytes > piece.row_bytes or not fits):
                    self.faults.add("bounds")
            if piece.rows == 1 and access.num_rows > 1 and access.stride != access.row_bytes:
                self.faults.add("bounds")
            if piece.read_only and access.content:
                at, pitch = access.offset - piece.offset, piece.row_bytes
                size = access.row_bytes * access.num_rows
                whole = at % pitch == 0 and (access.row_bytes == pitch if access.num_rows > 1 else size % pitch == 0)
                if access.content != CONSTANT or not (whole or piece.rows == 1):
                    self.faults.add("bounds")
            if not piece.read_only:
                if access.content == CONSTANT:
                    self.faults.add("bounds")
                rows = set()
                for b in begins:
                    at = b - piece.offset
                    rows |= {*range(at // piece.row_bytes, (at + access.row_bytes - 1) // piece.row_bytes + 1)}
                clears = access.clears and len(rows) == piece.rows
                if self.has_step and len(rows) != piece.rows:
                    self.faults.add("bounds")
                use = "look" if access.early else "clear" if clears else "fill" if access.write else "read"
                for row, b in enumerate(begins):
                    end = b + access.row_bytes
                    yield Run(access.write, access.rank, access.space, b, end, use, piece.name, access.content, row)
