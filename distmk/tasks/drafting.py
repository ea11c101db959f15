"""Drafts (speculative decoding), on rank 0: how many of an iteration's drafts are accepted, and what may follow them.

A sequence's last token and its drafts are rows of one run. Every row draws the target's token, as if the drafts before it
were the sequence's own tokens. Drafts are accepted as long as they equal the tokens that were drawn (Leviathan et al.,
arXiv:2211.17192, with one draw for both models). A draw depends on seed and position alone, so the tokens are the same as
without drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import (
    MAX_DRAFTS,
    MAX_PROGRAMS,
    MAX_ROWS,
    Candidate,
    DraftPace,
    DraftSlot,
    DraftSource,
    DraftTotals,
    LaunchKind,
)
from distmk.graph.regions import Region
from distmk.graph.task import Access, Content, Layout, Task, access, require, task_type
from distmk.tasks.sampling import SampleRow
from distmk.tasks.slots import (
    check_num_rows,
    check_num_slots,
    check_sampling_capacity,
    row_accesses,
)

DRAFTS: Content = ("drafts",)
CANDIDATE_BYTES = ctypes.sizeof(Candidate)
MAX_MATCH = 64  # most tokens that a match counts


def drafts_bytes(num_slots: int) -> int:
    """The size of a DraftSlot for each slot, of DraftTotals, and of a DraftPace for each program."""
    return ctypes.sizeof(DraftSlot) * num_slots + ctypes.sizeof(DraftTotals) + MAX_PROGRAMS * ctypes.sizeof(DraftPace)


def drafts_accesses(rank: int, drafts: int, num_slots: int) -> list[Access]:
    """The read and the write of the drafts of all slots, with their totals."""
    read = access(False, rank, drafts, drafts_bytes(num_slots), align_bytes=8, content=DRAFTS)
    return [read, read._replace(write=True)]


def _accesses(rank: int, args: Any) -> list[Access]:
    """Those of a task that changes drafts: of these, of the batch, and writes of the ids of sequences."""
    check_num_slots(args)
    check_num_rows(args.num_rows)
    require(rank == 0, "drafts are rank 0's")
    ids = [access(True, rank, args.tables, args.tables_bytes)] if args.tables else []
    return [*ids, *drafts_accesses(rank, args.drafts, args.num_slots), *row_accesses(rank, args)]


class AcceptDraftsArgs(ctypes.Structure):
    _fields_ = [
        ("candidates", c_uint64),  # Candidate [num_ranks, num_rows]
        ("drawn", c_uint64),  # Candidate [num_rows], the tokens of drawn rows
        ("drafts", c_uint64),  # see `drafts_bytes`
        ("tables", c_uint64),  # the buffer that operands in DraftSlot point into; 0: those operands are addresses
        ("batch", c_uint64),
        ("num_ranks", c_uint32),
        ("num_rows", c_uint32),
        ("num_slots", c_uint32),
        ("is_job_batch", c_uint32),  # 1: the batch is a JobBatch
        ("tables_bytes", c_uint32),
        ("pad", c_uint32),
    ]


@task_type(27, "accept_drafts")
@dataclass(frozen=True, eq=False)
class AcceptDrafts(Task):
    """Append the tokens that an iteration has given to the ids of their sequences: `DraftSlot.num_tokens`.

    Of a run that is the token of its first sampled row, and as long as the next row's token equals it, that row's.
    """

    candidates: Region = None  # type: ignore[assignment]
    drawn: Region = None  # type: ignore[assignment]
    drafts: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    num_ranks: int = 1
    tables: Region | None = None
    num_rows: int = MAX_ROWS
    num_slots: int = MAX_ROWS
    is_job_batch: bool = False

    Args: ClassVar[type[ctypes.Structure]] = AcceptDraftsArgs

    def dtypes(self) -> Mapping[str, str | None]:
        return {"candidates": "u8", "drawn": "u8", "drafts": "u8", "batch": None, "tables": "u8"}

    def reads(self) -> Iterable[Region]:
        return (self.candidates, self.drawn, self.drafts, self.batch)

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.drafts, self.tables))

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"tables_bytes": self.tables.cols if self.tables else 0}

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_sampling_capacity(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.num_ranks == num_ranks, "num_ranks is not that of the program")
        return [
            access(False, rank, args.candidates, CANDIDATE_BYTES * args.num_rows * args.num_ranks),
            access(False, rank, args.drawn, CANDIDATE_BYTES * args.num_rows),
            *_accesses(rank, args),
        ]


class ProposeDraftsArgs(ctypes.Structure):
    _fields_ = [
        ("drafts", c_uint64),  # see `drafts_bytes`
        ("tables", c_uint64),  # the buffer that operands in DraftSlot point into; 0: those operands are addresses
        ("batch", c_uint64),
        ("num_rows", c_uint32),
        ("num_slots", c_uint32),
        ("is_job_batch", c_uint32),  # 1: the batch is a JobBatch
        ("source", c_uint32),  # DraftSource
        ("max_drafts", c_uint32),
        ("min_match", c_uint32),
        ("max_match", c_uint32),
        ("drafts_per_match", c_uint32),  # most drafts for each token that matches, in 256ths
        ("tables_bytes", c_uint32),
        ("max_ids", c_uint32),  # of a sequence, drafts included
    ]


@task_type(28, "propose_drafts")
@dataclass(frozen=True, eq=False)
class ProposeDrafts(Task):
    """Look for the last tokens of each sequence in its own history: what followed there are its drafts.

    An instance is a sampled row; the first one of a sequence does its work. The longest match counts, up to `max_match`
    tokens; a shorter one than `min_match` counts as none. It may end at any of the last MAX_SEARCHED positions.

    max_ids: ids that a sequence has room for, drafts included.
    """

    drafts: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    tables: Region | None = None
    max_ids: int = 0
    num_rows: int = MAX_ROWS
    num_slots: int = MAX_ROWS
    is_job_batch: bool = False
    source: DraftSource = DraftSource.LATEST
    max_drafts: int = MAX_DRAFTS
    min_match: int = 1
    max_match: int = MAX_MATCH
    drafts_per_match: int = 256 * MAX_DRAFTS
    launch: LaunchKind = LaunchKind.SPREAD

    Args: ClassVar[type[ctypes.Structure]] = ProposeDraftsArgs
    loops_over_instances: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"drafts": "u8", "batch": None, "tables": "u8"}

    def reads(self) -> Iterable[Region]:
        return filter(None, (self.drafts, self.batch, self.tables))

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.drafts, self.tables))

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"tables_bytes": self.tables.cols if self.tables else 0}

    def max_instances(self) -> int:
        return self.num_rows

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(args.num_rows)

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_sampling_capacity(args, step)
        require(args.max_drafts <= step.max_drafts, "there are more drafts than the scheduler step verifies")
        require(args.max_ids <= step.max_positions + 1, "there are drafts behind the longest sequence")

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.source in set(DraftSource), "the source of drafts is unknown")
        require(1 <= args.max_drafts <= MAX_DRAFTS, "max_drafts is out of range")
        require(1 <= args.min_match <= args.max_match <= MAX_MATCH, "the lengths of matches are out of range")
        ids = [access(False, rank, args.tables, args.tables_bytes)] if args.tables else []
        return [*ids, *_accesses(rank, args)]


@task_type(29, "verify_row")
@dataclass(frozen=True, eq=False)
class VerifyRow(SampleRow):
    """SampleRow in a program with drafts. A row whose token is a draft (RowSample.VERIFY) is drawn like all others; for
    penalties, that draft and those before it count as tokens of the sequence.
    """
