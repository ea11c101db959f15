"""Every access of every task lies inside one allocation and is described by a range of its byte columns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distmk.abi import MAX_RANKS, LaunchKind, Space
from distmk.check.allocations import Allocations
from distmk.check.findings import Findings
from distmk.errors import shown
from distmk.graph.task import CONSTANT, ZEROS, Content
from distmk.program.layout import Placed
from distmk.program.program import decode_args
from distmk.program.reader import ProgramTables
from distmk.tasks import TASK_TYPES, Access

# Argument fields that say how many accesses a task has. The limits keep a damaged field from making a list of billions.
LOOP_FIELDS = {"num_blocks": 64 * MAX_RANKS, "num_ranks": MAX_RANKS}


class Span(NamedTuple):
    """Bytes [begin, end) of every row of an allocation on one rank (`location`, see `Allocations`).

    `polls`: the task may read these bytes before its waits are met. `resets`: it writes zeros there, in all rows.
    `owner`: see `Access`.
    """

    write: bool
    location: int
    begin: int
    end: int
    polls: bool = False
    resets: bool = False
    owner: int | None = None


@dataclass(frozen=True)
class Contents:
    """How tasks interpret the bytes of each location (`Access.content`)."""

    typed: dict[int, dict[Content, list[Span]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    untyped_writes: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))

    def note(self, content: Content, span: Span) -> None:
        """Record an access."""
        if content:
            self.typed[span.location][content].append(span)
        elif span.write:
            self.untyped_writes[span.location].append(span)


@dataclass(frozen=True)
class Accesses:
    """The accesses of all tasks."""

    allocations: Allocations
    spans: list[tuple[Span, ...]]  # by task: its accesses to memory that any task may write
    targets: list[frozenset[int]]  # by task: the ranks whose memory it writes
    distinct: list[Span]  # every span once; equal spans are the same object
    skips_waits: list[int]  # tasks that may end before their waits are met
    skippable: list[int]  # tasks that may have nothing to do in an iteration
    may_idle: frozenset[int]  # skippable tasks that then signal before their waits are met
    contents: Contents
    batches: dict[int | None, int]  # by operand of batch metadata (None: the type has none): a task that has it

    def describe(self, span: Span) -> str:
        name, rank = self.allocations.describe(span.location)
        return f"{name}[bytes {span.begin}:{span.end}] on rank {rank}"


def check_bounds(tables: ProgramTables, findings: Findings) -> Accesses:
    """Decode the accesses of all tasks. An access that is not inside one allocation is a fault."""
    return _Reader(tables, findings).run()


class _Reader:
    def __init__(self, tables: ProgramTables, findings: Findings) -> None:
        self.tables, self.findings = tables, findings
        self.allocations = Allocations(tables, findings)
        self.known: dict[tuple[int, Access], Span | None] = {}  # by the accessing rank and access
        self.distinct: dict[Span, Span] = {}
        self.skips_waits: list[int] = []
        self.skippable: list[int] = []
        self.may_idle: set[int] = set()
        self.contents = Contents()
        self.batches: dict[int | None, int] = {}
        self.step = self._step_args()

    def _step_args(self) -> Any:
        """The arguments of the scheduler step; None if the program has no such step."""
        steps = np.flatnonzero(self.tables.tasks.launch == LaunchKind.SCHEDULER)
        rank = int(self.tables.tasks.rank[steps[0]]) if len(steps) else 0
        index = self.tables.descriptor_of[rank][steps[0] - self.tables.first_task[rank]] if len(steps) else None
        return None if index is None else decode_args(self.tables.ranks[rank].tasks[int(index)])

    def run(self) -> Accesses:
        spans, targets = [], []
        num_ranks = self.tables.num_ranks
        for rank, part in enumerate(self.tables.ranks):
            first = int(self.tables.first_task[rank])
            for task, index in enumerate(self.tables.descriptor_of[rank].tolist(), first):
                task_spans = self._spans(task, part.tasks[index], rank)
                spans.append(task_spans)
                targets.append(frozenset(span.location % num_ranks for span in task_spans if span.write))
                is_spread, kind = self.tables.tasks.spread[task], TASK_TYPES[part.tasks[index].type]
                if is_spread and not kind.writes_peers and targets[-1] - {rank}:
                    text = "writes to other ranks, where a push would count for all instances of its worker"
                    self.findings.add("spread", f"{self.tables.describe_task(task)} {text}")
        return Accesses(
            self.allocations,
            spans,
            targets,
            list(self.distinct),
            self.skips_waits,
            self.skippable,
            frozenset(self.may_idle),
            self.contents,
            self.batches,
        )

    def _spans(self, task: int, desc: Any, rank: int) -> tuple[Span, ...]:
        try:
            args = decode_args(desc)
            for field, limit in LOOP_FIELDS.items():
                if getattr(args, field, 0) > limit:
                    raise ValueError(f"{field} is {getattr(args, field)}")
            kind = TASK_TYPES[desc.type]
            accesses = kind.accesses(args, rank, self.tables.num_ranks)
            if kind.bodies and not (isinstance(accesses, list) and all(isinstance(a, Access) for a in accesses)):
                raise ValueError(f"accesses() returns {shown(accesses)}; a list of Access was expected")
            if kind.skips_waits(args):
                self.skips_waits.append(task)
            if kind.may_skip(args):
                self.skippable.append(task)
            if kind.may_idle:
                self.may_idle.add(task)
            if kind.num_instances(args) != desc.max_instances:
                raise ValueError(f"they have {kind.num_instances(args)} instances, not {desc.max_instances}")
            if self.step is not None:
                kind.check_capacity(args, self.step)
            self.batches.setdefault(getattr(args, "batch", None), task)
        except Exception as error:  # a damaged descriptor may hold any bytes
            fault = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.findings.add("bounds", f"{self.tables.describe_task(task)}: arguments cannot be read ({fault})")
            return ()
        spans: list[Span] = []
        for access in accesses:
            key = (rank, access)
            if key not in self.known:
                try:
                    self.known[key] = self._locate(access, rank)
                except ValueError as error:
                    does = "write" if access.write else "read"
                    what = f"{does} of {access.num_rows} x {access.row_bytes} bytes at {access.offset}"
                    text = f"{what} on rank {access.rank} {error}"
                    self.findings.add("bounds", f"{self.tables.describe_task(task)}: {text}")
                    continue
            span = self.known[key]
            if span is not None:
                spans.append(span)
        if len({span.location for span in spans}) < len(spans) and (where := overlap_of(spans)):
            name = self.allocations.describe(where.location)[0]
            text = f"writes bytes {where.begin} to {where.end} of a row of {name} that it also accesses otherwise"
            self.findings.add("overlap", f"{self.tables.describe_task(task)} {text}")
        return tuple(spans)

    def _locate(self, access: Access, rank: int) -> Span | None:
        """The span of an access; None for a read of memory that no task writes. ValueError: the access has a fault."""
        self._check_shape(access, rank)
        index = self.allocations.find(access.space, access.rank, access.offset)
        if index < 0:
            raise ValueError("is in no buffer")
        piece = self.allocations.every[index]
        offset = access.offset - piece.offset
        if offset + (access.num_rows - 1) * access.stride + access.row_bytes > piece.num_bytes:
            raise ValueError(f"is not inside buffer {piece.name} ({piece.num_bytes} bytes at {piece.offset})")
        if piece.read_only:
            if access.write:
                raise ValueError(f"hits {piece.name}, which is read only")
            if access.content and access.content != CONSTANT:
                raise ValueError(f"is of a {access.content[0]}, and {piece.name} is read only")
            if access.content and not _is_whole_rows(access, piece, offset):
                raise ValueError(f"is not of whole rows of {piece.name}, which has rows of {piece.row_bytes} bytes")
            return None
        if access.content == CONSTANT:
            raise ValueError(f"is ahead of the task's waits, and {piece.name} is not read only")
        begin, end = _columns(access, piece, offset)
        location = index * self.tables.num_ranks + access.rank
        all_rows = access.num_rows * access.row_bytes == piece.rows * (end - begin)
        if self.step is not None and not all_rows:
            raise ValueError(f"covers some of the {piece.rows} rows of {piece.name}")
        polls, resets = access.early and not access.write, access.clears and access.write and all_rows
        span = Span(access.write, location, begin, end, polls, resets, access.owner)
        if access.content != ZEROS:
            span = self.distinct.setdefault(span, span)
        self.contents.note(access.content, span)
        return None if access.content == ZEROS else span

    def _check_shape(self, access: Access, rank: int) -> None:
        num_ranks, align_bytes = self.tables.num_ranks, access.align_bytes
        if not 0 <= access.rank < num_ranks:
            raise ValueError(f"is on a rank that is not there (ranks: {num_ranks})")
        if access.rank != rank and (access.space != Space.HEAP or not access.write):
            raise ValueError(f"is remote: rank {rank} may only write, and only to the heap")
        if access.row_bytes < 1 or access.num_rows < 1:
            raise ValueError("is empty")
        if access.offset % align_bytes or (access.num_rows > 1 and access.stride % align_bytes):
            raise ValueError(f"is not aligned to {align_bytes} bytes")
        if access.num_rows > 1 and access.stride < access.row_bytes:
            raise ValueError(f"has rows that overlap (stride {access.stride})")


def _is_whole_rows(access: Access, piece: Placed, offset: int) -> bool:
    num_bytes, pitch = access.row_bytes * access.num_rows, piece.row_bytes
    if access.row_bytes % 4 == 0 and piece.rows == 1:  # a vector
        return True
    return offset % pitch == 0 and (access.row_bytes == pitch if access.num_rows > 1 else num_bytes % pitch == 0)


def overlap_of(spans: list[Span]) -> Span | None:
    """A written span that overlaps another span of the same task; None if there is none.

    Reading exactly the written bytes is allowed.
    """
    writes = [span[1:4] for span in spans if span.write]
    if len(set(writes)) < len(writes):  # two writes of the same bytes
        return next(span for span in spans if span.write and writes.count(span[1:4]) > 1)
    written = {span[1:4]: False for span in spans} | dict.fromkeys(
        writes, True
    )  # a read of what is written counts as written
    ends: dict[bool, tuple[int, int]] = {}  # by whether it is written: location and end of the bytes so far
    for (location, begin, end), write in sorted(written.items()):
        for other in (False, True):
            at, reach = ends.get(other, (-1, 0))
            if (write or other) and at == location and reach > begin:
                return Span(True, location, begin, end)
        at, reach = ends.get(write, (-1, 0))
        ends[write] = (location, max(end, reach if at == location else 0))
    return None


def _columns(access: Access, piece: Placed, offset: int) -> tuple[int, int]:
    """The byte columns of `piece` that an access inside it covers. ValueError: it does not cover a range of columns."""
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
