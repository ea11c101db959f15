"""Sampling of rows that need their logits over the whole vocabulary: rank 0 collects them, draws a token, reports logprobs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_ROWS, Candidate, LogprobRecord, SlotSampling
from distmk.graph.regions import Region
from distmk.graph.task import (
    Access,
    Content,
    Layout,
    Task,
    access,
    f32_access,
    require,
    task_type,
)
from distmk.model.shards import partition
from distmk.tasks.slots import (
    check_batch_kind,
    check_num_rows,
    check_num_slots,
    check_row_capacity,
    check_sampling_capacity,
    check_slot_capacity,
    row_accesses,
)

SLOT_BYTES = ctypes.sizeof(SlotSampling)
DRAWN_BYTES, RECORD_BYTES = ctypes.sizeof(Candidate), ctypes.sizeof(LogprobRecord)
SLOTS: Content = ("slot sampling",)
MAX_VOCAB = 1 << 23  # the sum of all tokens' probabilities, at most 2**40 each, fits 64 bits
VECTOR = 4  # logits that are loaded together


def section_stride(vocab: int, num_ranks: int) -> int:
    """In a row over the whole vocabulary: the columns from the beginning of one rank's logits to that of the next rank's."""
    largest = -(-vocab // num_ranks)
    return -(-largest // VECTOR) * VECTOR


def mask_words(vocab: int) -> int:
    """The number of 32-bit words that have a bit for each token: bit t % 32 of word t / 32 is that of token t."""
    return -(-vocab // 32)


def mask_vector_words(vocab: int) -> int:
    """`mask_words` in whole vectors of 16 bytes: the number of words behind a TokenMask."""
    return -(-vocab // 128) * 4


def slots_access(rank: int, slots: int, num_slots: int, write: bool = False) -> Access:
    """The parameters of all slots."""
    return access(write, rank, slots, SLOT_BYTES * num_slots, align_bytes=8, content=SLOTS)


class SendLogitsArgs(ctypes.Structure):
    _fields_ = [
        ("logits", c_uint64),  # f32 columns of every row, at the same place of rank 0's heap
        ("batch", c_uint64),
        ("num_cols", c_uint32),
        ("stride", c_uint32),  # elements
        ("num_rows", c_uint32),  # rows of the logits
        ("is_job_batch", c_uint32),  # 1: the batch is a JobBatch
    ]


@task_type(12, "send_logits")
@dataclass(frozen=True, eq=False)
class SendLogits(Task):
    """Put the logits of rows that need them (RowSample.DRAW, SCORE) to the same columns on rank 0.

    is_job_batch: the batch is a JobBatch.
    """

    logits: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    is_job_batch: bool = False

    Args: ClassVar[type[ctypes.Structure]] = SendLogitsArgs
    may_idle: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"logits": "f32", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.logits, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.logits.on(0),)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num_cols": self.logits.cols, "stride": self.logits.buffer.cols, "num_rows": self.logits.buffer.rows}

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_row_capacity(args.num_rows, step)
        check_batch_kind(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(rank > 0, "rank 0 sends logits to itself")
        check_num_rows(args.num_rows)
        mine = f32_access(False, rank, args.logits, args.num_cols, args.num_rows, args.stride)
        return [mine, mine._replace(write=True, rank=0), *row_accesses(rank, args)]


class CountTokensArgs(ctypes.Structure):
    _fields_ = [
        ("slots", c_uint64),  # SlotSampling [num_slots]
        ("counts", c_uint64),  # u32 [num_slots, vocab]
        ("tables", c_uint64),  # the buffer that operands in SlotSampling point into; 0: those operands are addresses
        ("batch", c_uint64),
        ("vocab", c_uint32),
        ("tables_bytes", c_uint32),
        ("num_slots", c_uint32),
        ("is_job_batch", c_uint32),  # 1: the batch is a JobBatch
    ]


@task_type(13, "count_tokens")
@dataclass(frozen=True, eq=False)
class CountTokens(Task):
    """Update the token counts that the penalties of this iteration's draws depend on.

    counts: i32 [num_slots, vocab], how often each token is in the output of the slot's sequence, and COUNT_IN_PROMPT.
    is_job_batch: the batch is a JobBatch.
    """

    slots: Region = None  # type: ignore[assignment]
    counts: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    tables: Region | None = None
    num_slots: int = MAX_ROWS
    is_job_batch: bool = False

    Args: ClassVar[type[ctypes.Structure]] = CountTokensArgs
    may_idle: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"slots": "u8", "counts": "i32", "batch": None, "tables": "u8"}

    def reads(self) -> Iterable[Region]:
        return filter(None, (self.slots, self.counts, self.batch, self.tables))

    def writes(self) -> Iterable[Region]:
        return (self.slots, self.counts)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"vocab": self.counts.cols // self.num_slots, "tables_bytes": self.tables.cols if self.tables else 0}

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_slot_capacity(args, step)
        check_batch_kind(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_num_slots(args)
        counts = counts_access(rank, args)
        accesses = [slots_access(rank, args.slots, args.num_slots, write) for write in (False, True)]
        accesses += [counts, counts._replace(write=True), *row_accesses(rank, args)]
        return [*accesses, tables_access(rank, args)] if args.tables else accesses


def counts_access(rank: int, args: Any) -> Access:
    """The read of the counts of all slots."""
    return access(False, rank, args.counts, 4 * args.num_slots * args.vocab)


def tables_access(rank: int, args: Any) -> Access:
    """The read of the tables that operands in SlotSampling point to."""
    return access(False, rank, args.tables, args.tables_bytes)


class SampleRowArgs(ctypes.Structure):
    _fields_ = [
        ("logits", c_uint64),  # f32 [num_rows, num_ranks, section_stride]
        ("slots", c_uint64),  # SlotSampling [num_slots]
        ("counts", c_uint64),  # u32 [num_slots, vocab]
        ("mask", c_uint64),  # u32 [mask_vector_words], of this row
        ("adjusted", c_uint64),  # f32 [num_ranks, section_stride], of this row
        ("drawn", c_uint64),  # Candidate
        ("record", c_uint64),  # LogprobRecord
        ("tables", c_uint64),  # as in CountTokensArgs
        ("batch", c_uint64),
        ("row", c_uint32),
        ("vocab", c_uint32),
        ("num_ranks", c_uint32),
        ("section_stride", c_uint32),
        ("tables_bytes", c_uint32),
        ("num_rows", c_uint32),
        ("num_slots", c_uint32),
        ("is_job_batch", c_uint32),  # 1: the batch is a JobBatch
    ]


@task_type(14, "sample_row")
@dataclass(frozen=True, eq=False)
class SampleRow(Task):
    """Draw the token of row `row` of the batch with the parameters of its slot, or score a given one; see `SlotSampling`.

    A row whose mask has not come is not drawn (`PENDING_TOKEN`). A row without an allowed token is not either
    (`NO_TOKEN_ALLOWED`).

    logits: f32 [maximum of sampled rows, ranks' sections] (`section_stride`).
    slots: u8, SlotSampling [num_slots].
    counts: see `CountTokens`.
    mask: i32 [mask_vector_words], room for a copy of the words of a TokenMask.
    adjusted: f32, room for a row of logits.
    drawn: u8, a Candidate whose value has no meaning.
    record: u8, LogprobRecord.
    is_job_batch: the batch is a JobBatch.

    A draw is the argmax of logit / temperature plus Gumbel noise (Maddison et al., arXiv:1411.0030) over the kept
    tokens. Seed, position and token id determine the random number of each token. top-p: Holtzman et al.,
    arXiv:1904.09751, by rejection, as in FlashInfer's samplers (Ye et al., arXiv:2501.01005); min-p: Nguyen et al.,
    arXiv:2407.01082.
    """

    logits: Region = None  # type: ignore[assignment]
    slots: Region = None  # type: ignore[assignment]
    counts: Region = None  # type: ignore[assignment]
    mask: Region = None  # type: ignore[assignment]
    adjusted: Region = None  # type: ignore[assignment]
    drawn: Region = None  # type: ignore[assignment]
    record: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    tables: Region | None = None
    row: int = 0
    num_ranks: int = 1
    num_slots: int = MAX_ROWS
    is_job_batch: bool = False

    Args: ClassVar[type[ctypes.Structure]] = SampleRowArgs
    may_idle: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        tables = {"slots": "u8", "counts": "i32", "mask": "i32", "tables": "u8"}
        return {"logits": "f32", "adjusted": "f32", "drawn": "u8", "record": "u8", "batch": None, **tables}

    def reads(self) -> Iterable[Region]:
        yield from self._sections()
        yield from filter(None, (self.slots, self.counts, self.batch, self.tables))

    def _sections(self) -> Iterable[Region]:
        """The ranks' shards; the columns between them are padding."""
        stride = self.logits.cols // self.num_ranks
        for rank, (begin, end) in enumerate(partition(self.counts.cols // self.num_slots, self.num_ranks)):
            first = self.logits.begin + rank * stride
            yield self.logits._replace(begin=first, end=first + end - begin)

    def writes(self) -> Iterable[Region]:
        return (self.mask, self.adjusted, self.drawn, self.record)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "vocab": self.counts.cols // self.num_slots,
            "section_stride": self.logits.cols // self.num_ranks,
            "tables_bytes": self.tables.cols if self.tables else 0,
            "num_rows": self.logits.buffer.rows,
        }

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_sampling_capacity(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_num_slots(args)
        check_num_rows(args.num_rows)
        require(args.row < args.num_rows, "there is no such row")
        require(args.num_ranks > 0 and args.vocab > 0, "there is no vocabulary")
        require(args.vocab <= MAX_VOCAB, "the vocabulary is too large")
        require(args.section_stride % VECTOR == 0, "sections are not of whole vectors")
        require(args.section_stride >= -(-args.vocab // args.num_ranks), "a section is smaller than a rank's shard")
        row_bytes = 4 * args.num_ranks * args.section_stride
        sections = [
            access(
                False, rank, args.logits + 4 * r * args.section_stride, 4 * (end - begin), args.num_rows, row_bytes, 16
            )
            for r, (begin, end) in enumerate(partition(args.vocab, args.num_ranks))
        ]
        reads = [
            *sections,
            slots_access(rank, args.slots, args.num_slots),
            counts_access(rank, args),
            *row_accesses(rank, args),
        ]
        if args.tables:
            reads.append(tables_access(rank, args))
        return [
            *reads,
            access(True, rank, args.mask, 4 * mask_vector_words(args.vocab), align_bytes=16),
            access(True, rank, args.adjusted, row_bytes, align_bytes=16),
            access(True, rank, args.drawn, DRAWN_BYTES),
            access(True, rank, args.record, RECORD_BYTES),
        ]
