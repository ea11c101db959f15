"""Where the accesses of encoded tasks land: in bounds of one placed piece, as an interval of its columns."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any, NamedTuple

from distmk.abi import EVENT_STRIDE_BYTES, MAX_RANKS, Control, JitEntry, JitRing, Space
from distmk.check.findings import Findings
from distmk.check.view import View
from distmk.program.layout import Placed
from distmk.program.program import decode_args
from distmk.tasks import TASK_TYPES, Access

ALIGN_BYTES = 4
# Fields of task arguments that say how many accesses there are: a damaged one must not make a list of billions.
LOOP_FIELDS = {"num_blocks": 64 * MAX_RANKS, "num_ranks": MAX_RANKS}


class Span(NamedTuple):
    """Bytes [begin, end) of every row of a piece, on one rank. `place` numbers (piece, rank).

    `early`: read perhaps before the task's waits are met. `clears`: left zero, in all rows.
    """

    write: bool
    place: int
    begin: int
    end: int
    early: bool = False
    clears: bool = False


class Memory:
    """The placed pieces, and what each task touches of them."""

    def __init__(self, view: View, findings: Findings) -> None:
        self.view = view
        self.findings = findings
        self.pieces = view.program.placement.pieces
        self._known: dict[tuple[int, Access], Span | None] = {}
        self.distinct: dict[Span, Span] = {}  # all that any task touches, each the only one like it
        self.skipping: list[int] = []  # tasks that may end before their waits are met
        self.passing: list[int] = []  # and those that may have nothing to do
        self._rooms: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self._check_pieces()

    def buffer_of(self, place: int) -> tuple[str, int]:
        """Name of the piece, and the rank, of a place."""
        return self.pieces[place // self.view.num_ranks].name, place % self.view.num_ranks

    def spans(self) -> tuple[list[tuple[Span, ...]], list[frozenset[int]]]:
        """What each task touches that anybody writes, and the ranks whose memory it writes."""
        touched, targets = [], []
        for rank, part in enumerate(self.view.parts):
            first = int(self.view.first_task[rank])
            for task, index in enumerate(self.view.descriptors[rank].tolist(), first):
                found = self._of_task(task, part.tasks[index], rank)
                touched.append(found)
                targets.append(frozenset(span.place % self.view.num_ranks for span in found if span.write))
                if self.view.spread[task] and targets[-1] - {rank}:
                    text = "writes to other ranks, and a push would count for a whole share"
                    self.findings.add("spread", f"{self.view.task_name(task)} {text}")
        return touched, targets

    def _of_task(self, task: int, desc: Any, rank: int) -> tuple[Span, ...]:
        try:
            args = decode_args(desc)
            for field, limit in LOOP_FIELDS.items():
                if getattr(args, field, 0) > limit:
                    raise ValueError(f"{field} is {getattr(args, field)}")
            kind = TASK_TYPES[desc.type]
            accesses = kind.accesses(args, rank, self.view.num_ranks)
            if kind.skips_waits(args):
                self.skipping.append(task)
            if kind.may_skip(args):
                self.passing.append(task)
        except Exception as error:  # any bytes may be found in a damaged descriptor
            self.findings.add("bounds", f"{self.view.task_name(task)}: arguments cannot be read ({error})")
            return ()
        found: list[Span] = []
        for access in accesses:
            key = (rank, access)
            if key not in self._known:
                try:
                    self._known[key] = self._locate(access, rank)
                except ValueError as error:
                    does = "write" if access.write else "read"
                    where = f"{does} of {access.num_rows} x {access.row_bytes} bytes at {access.offset}"
                    self.findings.add("bounds", f"{self.view.task_name(task)}: {where} on rank {access.rank} {error}")
                    continue
            span = self._known[key]
            if span is not None:
                found.append(span)
        return tuple(found)

    def _locate(self, access: Access, rank: int) -> Span | None:
        """The span of an access; None where it only reads what nobody writes."""
        if not 0 <= access.rank < self.view.num_ranks:
            raise ValueError(f"is on a rank that is not there (ranks: {self.view.num_ranks})")
        if access.rank != rank and (access.space != Space.HEAP or not access.write):
            raise ValueError(f"is remote: rank {rank} may only write, and only to the heap")
        if access.row_bytes < 1 or access.num_rows < 1:
            raise ValueError("is empty")
        align_bytes = access.align_bytes
        if access.offset % align_bytes or (access.num_rows > 1 and access.stride % align_bytes):
            raise ValueError(f"is not aligned to {align_bytes} bytes")
        if access.num_rows > 1 and access.stride < access.row_bytes:
            raise ValueError(f"has rows that overlap (stride {access.stride})")
        starts, order = self._rooms.get((access.space, access.rank), ([], []))
        at = bisect_right(starts, access.offset) - 1
        if at < 0:
            raise ValueError("is in no placed buffer")
        piece = self.pieces[order[at]]
        offset = access.offset - piece.offset
        if offset + (access.num_rows - 1) * access.stride + access.row_bytes > piece.num_bytes:
            inside = f"buffer {piece.name} ({piece.num_bytes} bytes at {piece.offset})"
            raise ValueError(f"is not inside {inside}")
        if piece.read_only:
            if access.write:
                raise ValueError(f"hits {piece.name}, which is read only")
            return None
        begin, end = _columns(access, piece, offset)
        place = order[at] * self.view.num_ranks + access.rank
        all_rows = access.num_rows * access.row_bytes == piece.rows * (end - begin)
        early, clears = access.early and not access.write, access.clears and access.write and all_rows
        span = Span(access.write, place, begin, end, early, clears)
        return self.distinct.setdefault(span, span)

    def _check_pieces(self) -> None:
        headers = [part.header for part in self.view.parts]
        ring_bytes = ctypes.sizeof(JitRing) + headers[0].jit_capacity * ctypes.sizeof(JitEntry)
        num_events = max(header.num_events for header in headers)
        areas = [
            (0, ctypes.sizeof(Control), "the control block"),
            (headers[0].events_heap_offset, num_events * EVENT_STRIDE_BYTES, "the events"),
            (headers[0].rings_heap_offset, headers[0].num_workers * ring_bytes, "the rings"),
        ]
        cleared = headers[0].zeroed_heap_bytes
        for offset, num_bytes, name in areas:
            if offset % 8:
                self.findings.add("bounds", f"{name} at {offset} of the heap: not aligned to 8 bytes")
            if offset + num_bytes > cleared:
                text = f"{name} end at {offset + num_bytes} of the heap, of which a launch zeroes {cleared} bytes"
                self.findings.add("bounds", text)
        usable = [index for index, piece in enumerate(self.pieces) if self._well_formed(piece)]
        for rank, header in enumerate(headers):
            for space, size, fixed in ((Space.HEAP, header.heap_bytes, areas), (Space.LOCAL, header.local_bytes, [])):
                here = [i for i in usable if self.pieces[i].space == space and self.pieces[i].rank in (-1, rank)]
                here.sort(key=lambda i: self.pieces[i].offset)
                self._rooms[(int(space), rank)] = ([self.pieces[i].offset for i in here], here)
                if space == Space.HEAP and cleared > size:
                    self.findings.add("bounds", f"a launch zeroes {cleared} bytes of a heap of {size} on rank {rank}")
                named = [(p.offset, p.num_bytes, f"buffer {p.name}") for p in (self.pieces[i] for i in here)]
                self._check_room([*fixed, *named], size, f"the {space.name.lower()} memory of rank {rank}")

    def _well_formed(self, piece: Placed) -> bool:
        good = (
            piece.space in (Space.HEAP, Space.LOCAL)
            and -1 <= piece.rank < self.view.num_ranks
            and (piece.rank == -1 or piece.space == Space.LOCAL)
            and piece.offset >= 0
            and piece.offset % ALIGN_BYTES == 0
            and piece.rows >= 1
            and piece.row_bytes >= 1
        )
        if not good:
            self.findings.add("bounds", f"buffer {piece.name} is misplaced: {piece}")
        return good

    def _check_room(self, areas: list[tuple[int, int, str]], size: int, where: str) -> None:
        """Areas (offset, bytes, name) lie inside [0, size) and apart."""
        areas = sorted(areas)
        reach, holder = 0, ""
        for offset, num_bytes, name in areas:
            if offset + num_bytes > size:
                text = f"{name}: bytes {offset} to {offset + num_bytes} of {where}, which has {size}"
                self.findings.add("bounds", text)
            if num_bytes and offset < reach:
                text = f"{name} begins at {offset} of {where}, inside {holder}, which ends at {reach}"
                self.findings.add("overlap", text)
            if offset + num_bytes > reach:
                reach, holder = offset + num_bytes, name


def _columns(access: Access, piece: Placed, offset: int) -> tuple[int, int]:
    """The byte columns of `piece` that an access inside it covers; ValueError where it covers no such thing."""
    pitch, gapless = piece.row_bytes, access.num_rows == 1 or access.stride == access.row_bytes
    num_bytes = access.num_rows * access.row_bytes
    if piece.rows == 1 and gapless:
        return offset, offset + num_bytes
    if offset < pitch and offset + access.row_bytes <= pitch and (access.stride == pitch or access.num_rows == 1):
        return offset, offset + access.row_bytes
    if gapless and offset == 0 and num_bytes % pitch == 0:
        return 0, pitch
    shape = f"{piece.rows} rows of {pitch} bytes"
    raise ValueError(f"does not fit buffer {piece.name} of {shape} (stride {access.stride}, {offset} bytes in)")
