"""Sampling at the end of an iteration, and the scheduler step at the start of the next."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from ctypes import c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import (
    EVENTS_PER_ROW,
    MAX_BUCKET_ROWS,
    MAX_DRAFTS,
    MAX_PROGRAMS,
    MAX_ROWS,
    MAX_SEQUENCES,
    BatcherState,
    Candidate,
    KvPage,
    PagePoolState,
    TokenEvent,
)
from distmk.abi import Sequence as RunningSequence
from distmk.graph.regions import Region
from distmk.graph.task import Access, Layout, Task, access, batch_access, require, task_type
from distmk.tasks.activations import batch_accesses
from distmk.tasks.attention import page_table_content
from distmk.tasks.drafting import drafts_accesses
from distmk.tasks.sampling import RECORD_BYTES, slots_access
from distmk.tasks.slots import check_num_rows, check_row_capacity, sampled_rows_of, slots_for


def candidates_bytes(num_rows: int = MAX_ROWS) -> int:
    """The size of one Candidate for each row, in bytes."""
    return ctypes.sizeof(Candidate) * num_rows


def batcher_bytes(num_pages: int, max_seqs: int = MAX_ROWS) -> int:
    """Bytes of the batcher's state, with a KvPage for each page of the KV cache, and with the slots beyond MAX_ROWS."""
    pages = ctypes.sizeof(PagePoolState) + num_pages * ctypes.sizeof(KvPage)
    slot = ctypes.sizeof(RunningSequence) + EVENTS_PER_ROW * ctypes.sizeof(TokenEvent)
    return ctypes.sizeof(BatcherState) + pages + (slots_for(max_seqs) - MAX_ROWS) * slot


class SampleArgs(ctypes.Structure):
    _fields_ = [
        ("candidates", c_uint64),  # Candidate [num_tasks, num_rows] of this rank's head tasks
        ("out", c_uint64),  # Candidate [num_rows], this rank's slot on rank 0
        ("batch", c_uint64),
        ("num_tasks", c_uint32),
        ("num_rows", c_uint32),
    ]


@task_type(8, "sample")
@dataclass(frozen=True, eq=False)
class Sample(Task):
    """Per-shard argmax: this rank's best candidate for every sampled row (greedy; the lowest token id wins ties).

    candidates: Candidate [tasks of the head, num_rows]. out: Candidate [num_rows] on rank 0; the rows of the batch are
    written. A rank that reaches rank 0 by NVSHMEM first writes to the same offset of its own heap, and puts from there.
    """

    candidates: Region = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    num_rows: int = MAX_ROWS

    Args: ClassVar[type[ctypes.Structure]] = SampleArgs

    def reads(self) -> Iterable[Region]:
        return (self.candidates, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.out,) if self.out.rank == self.rank else (self.out.on(self.rank), self.out)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num_tasks": self.candidates.cols // candidates_bytes(self.num_rows)}

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_row_capacity(args.num_rows, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.candidates != args.out, "the candidates are the output")
        check_num_rows(args.num_rows)
        num_bytes = candidates_bytes(args.num_rows)
        return [
            access(False, rank, args.candidates, num_bytes * args.num_tasks),
            *(access(True, to, args.out, num_bytes) for to in sorted({0, rank})),
            batch_access(rank, args.batch),
        ]


class SchedulerStepArgs(ctypes.Structure):
    _fields_ = [
        ("candidates", c_uint64),  # Candidate [num_ranks, rows], where rows is the maximum of sampled rows
        ("batch", c_uint64),
        ("page_table", c_uint64),  # i32 [slots, max_pages]
        ("state", c_uint64),  # see BatcherState
        ("drawn", c_uint64),  # Candidate [rows], the tokens of drawn rows; 0: no row is drawn
        ("slots", c_uint64),  # SlotSampling [slots]; 0: no row is drawn
        ("logprobs", c_uint64),  # LogprobRecord [rows], of drawn and scored rows; 0: no row is drawn
        ("batches", c_uint64 * MAX_PROGRAMS),  # the batch of each program of the launch, `batch` among them
        ("num_ranks", c_uint32),
        ("page_size", c_uint32),
        ("max_pages", c_uint32),
        ("num_pages", c_uint32),
        ("max_slots", c_uint32),
        ("max_positions", c_uint32),
        ("program", c_uint32),  # number of this program
        ("num_programs", c_uint32),
        # Token rows of an iteration of each program, in ascending order. If more than MAX_ROWS, its batch is a
        # JobBatch.
        ("max_rows", c_uint16 * MAX_PROGRAMS),
        ("max_drafts", c_uint16),  # of a sequence in an iteration; 0 if there are no drafts
        ("row_cost", c_uint16),  # see SchedulerStep, in ROW_COST_UNIT
        ("drafts", c_uint64),  # see drafts_bytes; 0: there are no drafts
    ]


@task_type(9, "scheduler_step")
@dataclass(frozen=True, eq=False)
class SchedulerStep(Task):
    """Makes this iteration's batch metadata from the tokens of the last iteration, and puts it to every rank.

    Rank 0's scheduler 0 runs it.

    The step decides on stop conditions, admission of waiting requests, KV pages and prompt chunks; the host only reads
    tokens. It also chooses the program of the next iteration: the smallest row bucket that holds the rows to be
    computed (csrc/runtime/program_choice.h). If it makes a batch for another program, this program's turn ends.

    batches: the batch of each program of the launch, by number: u8 [sizeof(Batch)], or [sizeof(JobBatch)] if its
      iterations have more than MAX_ROWS rows.
    max_rows: the rows of an iteration of each program, in ascending order.
    program: the number of this program.
    drafts: if sequences have drafts (`AcceptDrafts`), u8: see `drafts_bytes`.
    max_drafts: the most drafts of a sequence in an iteration.
    row_cost: the time that one more row takes, in 1 / ROW_COST_UNIT of an iteration of one row, as long as it has not been
      measured. Drafts that gain less are not verified; with 0 all of them are.
    """

    candidates: Region = None  # type: ignore[assignment]
    batches: tuple[Region, ...] = ()
    page_table: Region = None  # type: ignore[assignment]
    state: Region = None  # type: ignore[assignment]
    drawn: Region | None = None
    slots: Region | None = None
    logprobs: Region | None = None
    drafts: Region | None = None
    num_ranks: int = 1
    page_size: int = 16
    num_pages: int = 1
    max_slots: int = MAX_ROWS
    max_positions: int = 0
    program: int = 0
    max_rows: tuple[int, ...] = (MAX_ROWS,)
    max_drafts: int = 0
    row_cost: int = 0

    Args: ClassVar[type[ctypes.Structure]] = SchedulerStepArgs
    runs_on_scheduler: ClassVar[bool] = True

    @property
    def batch(self) -> Region:
        """The batch of this program."""
        return self.batches[self.program]

    def reads(self) -> Iterable[Region]:
        own = (self.candidates, self.drawn, self.logprobs, self.drafts, self.state, self.page_table, self.batch)
        return filter(None, own)

    def writes(self) -> Iterable[Region]:
        yield self.state
        yield from filter(None, (self.slots, self.drafts))
        for rank in range(self.num_ranks):
            yield from (batch.on(rank) for batch in self.batches)
            yield self.page_table.on(rank)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "max_pages": self.page_table.cols // slots_for(self.max_slots),
            "batches": tuple(map(layout.operand, self.batches)),
            "num_programs": len(self.batches),
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.num_ranks == num_ranks, "num_ranks is not that of the program")
        require(
            len({args.drawn != 0, args.slots != 0, args.logprobs != 0}) == 1,
            "rows are drawn without parameters, or never",
        )
        require(args.slots != 0 or not args.drafts, "drafts are verified, and no row is drawn")
        require(bool(args.drafts) == bool(args.max_drafts), "there are drafts, and none is verified, or never")
        require(args.max_drafts <= MAX_DRAFTS, "max_drafts is out of range")
        require(1 <= args.max_slots <= MAX_SEQUENCES, "max_slots is out of range")
        require(1 <= args.num_programs <= MAX_PROGRAMS, "num_programs is out of range")
        require(args.program < args.num_programs, "program is out of range")
        batches, rows = args.batches[: args.num_programs], args.max_rows[: args.num_programs]
        require(0 not in batches and args.batch == batches[args.program], "the batches are not those of the programs")
        require(
            all(a < b for a, b in itertools.pairwise((0, *rows, MAX_BUCKET_ROWS + 1))),
            "max_rows is out of range or order",
        )
        require(args.max_slots <= rows[-1], "no iteration has a row for every sequence")
        require(args.page_size > 0 and not args.page_size & (args.page_size - 1), "page_size is no power of two")
        require(args.max_positions <= args.page_size * args.max_pages, "a sequence has more positions than pages")
        # With fewer positions, the oldest sequence could wait for a page forever.
        require(args.max_positions <= args.page_size * args.num_pages, "the cache is too small for one sequence")
        pages = page_table_content(args)
        num_slots, num_rows = slots_for(args.max_slots), sampled_rows_of(args)
        table = access(False, rank, args.page_table, 4 * num_slots * args.max_pages, content=pages)
        state_bytes = batcher_bytes(args.num_pages, args.max_slots)
        state = access(False, rank, args.state, state_bytes, content=("scheduler state",))
        drawn = [access(False, rank, args.drawn, candidates_bytes(num_rows))] if args.drawn else []
        slots = [slots_access(rank, args.slots, num_slots, write=True)] if args.slots else []
        drafts = drafts_accesses(rank, args.drafts, num_slots) if args.drafts else []
        logprobs = [access(False, rank, args.logprobs, RECORD_BYTES * num_rows)] if args.logprobs else []
        return [
            *drawn,
            *slots,
            *logprobs,
            *drafts,
            access(False, rank, args.candidates, candidates_bytes(num_rows) * args.num_ranks),
            state,
            state._replace(write=True),
            *(
                access
                for peer in range(num_ranks)
                for batch, max_rows in zip(batches, rows, strict=True)
                for access in batch_accesses(max_rows > MAX_ROWS, peer, batch, True)
            ),
            table,
            *(table._replace(write=True, rank=peer) for peer in range(num_ranks)),
            *batch_accesses(rows[args.program] > MAX_ROWS, rank, args.batch),
        ]
