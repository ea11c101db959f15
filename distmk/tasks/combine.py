"""The combine of attention's splits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_ROWS
from distmk.graph.regions import Region
from distmk.graph.task import Access, Layout, Task, access, batch_access, require, task_type, vector_accesses
from distmk.tasks.splits import AttentionShape, check_splits, partial_cols, slice_begin, splits_content


class CombineArgs(ctypes.Structure):
    _fields_ = [
        ("partials", c_uint64),  # partials of the first slice of this task
        ("out", c_uint64),  # bf16 [rows, heads of this rank * head_dim], at the first head of this task
        ("lamport_reset", c_uint64),  # columns to be reset, laid out as `out`; 0: none
        ("batch", c_uint64),
        ("first_slice", c_uint32),  # the slice's number in the first head
        ("num_slices", c_uint32),
        ("head_dim", c_uint32),
        ("out_stride", c_uint32),
        ("max_kv_splits", c_uint32),
        ("min_kv_split_len", c_uint32),
        ("kv_split_budget", c_uint32),
        ("polls_partials", c_uint32),  # 1: poll the partials, and reset them
        (
            "fused_combine_len",
            c_uint32,
        ),  # a single row that sees at most so many positions is not combined here; 0: it always is
        ("window", c_uint32),  # as attention's
    ]


@task_type(7, "combine")
@dataclass(frozen=True, eq=False)
class Combine(Task):
    """Attention's output from its partials: the splits of some slices of the query heads, weighted by log-sum-exp, in
    split order.

    slices: the range of slices, numbered over all heads of the rank. partials: f32, of these slices. out: bf16 [rows,
    columns of the slices]; only matrix products read it, and they would round it anyway. lamport_reset: see `Linear`.

    polls_partials: `partials` is a Lamport buffer. The task polls it before its waits are met (see `Linear`) and then resets it.

    skips_fused: the o projection may combine a single row itself (`Attention.fused_partials`); this task then has
    nothing to do.
    """

    shape: AttentionShape = None  # type: ignore[assignment]
    slices: tuple[int, int] = (0, 0)
    partials: Region = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    lamport_reset: Region | None = None
    polls_partials: bool = False
    skips_fused: bool = False

    Args: ClassVar[type[ctypes.Structure]] = CombineArgs
    polls_inputs: ClassVar[bool] = True
    resets_rows: ClassVar[bool] = True
    hot_variants: ClassVar[int] = 1

    def dtypes(self) -> Mapping[str, str | None]:
        return {"partials": "f32", "out": "bf16", "batch": None, "lamport_reset": "bf16"}

    def reads(self) -> Iterable[Region]:
        return (self.partials, self.batch)

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.out, self.lamport_reset, self.partials if self.polls_partials else None))

    def derived(self, layout: Layout) -> dict[str, Any]:
        s, (begin, end) = (self.shape, self.slices)
        first = begin % s.slices
        in_head = 2 * s.slice_begin(first)
        return {
            "out": layout.operand(self.out) - in_head,
            "lamport_reset": layout.operand(self.lamport_reset) - in_head if self.lamport_reset else 0,
            "first_slice": first,
            "num_slices": end - begin,
            "out_stride": self.out.buffer.cols,
            "fused_combine_len": s.fused_combine_len if self.skips_fused else 0,
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_splits(args)
        require(args.batch != 0, "there is no batch")
        require(args.polls_partials <= 1, "a flag is neither 0 nor 1")
        begin, end = args.first_slice, args.first_slice + args.num_slices
        first, last = (slice_begin(index, args.head_dim) for index in (begin, end))
        part_bytes = 4 * args.num_slices * partial_cols(args.max_kv_splits)
        part = access(False, rank, args.partials, part_bytes, content=splits_content("partials", args))
        out, reset = args.out + 2 * first, args.lamport_reset and args.lamport_reset + 2 * first
        accesses = [
            part._replace(early=bool(args.polls_partials)),
            *vector_accesses(rank, out, reset, last - first, MAX_ROWS, args.out_stride),
            batch_access(rank, args.batch),
        ]
        return [*accesses, part._replace(write=True, clears=True)] if args.polls_partials else accesses

    @classmethod
    def may_skip(cls, args: Any) -> bool:
        return bool(args.fused_combine_len)
