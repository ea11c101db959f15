"""Attention over the paged KV cache, in splits of the positions that `Combine` or a fused `Linear` combines (split-KV)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import HOT_HEAD_DIM, MAX_ROWS, POSITIONS_PER_PASS, ScoreArgs, check_scores, split_operand
from distmk.graph.regions import Region, Slab
from distmk.graph.task import (
    Access,
    Content,
    Layout,
    Task,
    access,
    batch_access,
    constant_access,
    f32_access,
    require,
    task_type,
)
from distmk.tasks.slots import check_num_slots, check_slot_capacity
from distmk.tasks.splits import (
    AttentionShape,
    check_fixed_splits,
    check_splits,
    fewest_splits,
    fused_partial_bytes,
    most_seen,
    num_slices,
    partial_cols,
    splits_content,
)


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("qkv", c_uint64),  # f32 [rows, (num_q + 2 num_kv) * head_dim], before norm and RoPE
        ("q_norm", c_uint64),  # f32 [head_dim]; 0: none
        ("k_norm", c_uint64),
        ("rope", c_uint64),  # f32 [positions, head_dim]
        ("k_cache", c_uint64),  # bf16 [page, kv head, position in page, head_dim]
        ("v_cache", c_uint64),
        ("page_table", c_uint64),  # i32 [slot, max_pages]
        ("partials", c_uint64),  # f32 [q head, slice, row, split, PARTIAL_FLOATS]
        # bf16 [q head, split, FUSED_PARTIAL_HEADER + head_dim]: the partials of a single row; 0: they go to `partials`
        ("fused_partials", c_uint64),
        ("lamport_reset", c_uint64),  # fused partials to be reset, laid out the same; 0: none
        ("batch", c_uint64),
        ("num_q", c_uint16),
        ("num_kv", c_uint16),
        ("head_dim", c_uint16),
        ("group", c_uint16),
        ("q_begin", c_uint32),
        ("kv_begin", c_uint32),
        ("page_size", c_uint32),
        ("max_pages", c_uint32),
        ("num_pages", c_uint32),
        ("max_kv_splits", c_uint32),
        ("min_kv_split_len", c_uint32),
        ("kv_split_budget", c_uint32),
        ("window", c_uint32),  # positions that a row sees, its own included
        ("eps", c_float),
        ("scores", ScoreArgs),
        ("num_positions", c_uint32),  # rows of the rope table
        ("qkv_stride", c_uint32),  # elements from one row of qkv to the next
        ("polls_qkv", c_uint8),  # 1: poll qkv
        ("long_splits", c_uint8),  # 1: a split may have more than POSITIONS_PER_PASS positions
        ("num_slots", c_uint16),
        (
            "fused_combine_len",
            c_uint32,
        ),  # positions that a single row in `fused_partials` sees at most; 0: it never is there
    ]


@task_type(6, "attention")
@dataclass(frozen=True, eq=False)
class Attention(Task):
    """softmax(shape.scores of q k^T) v in splits. An instance: the query heads of one KV head, one run of rows, one split.

    qkv: f32 [rows, qkv_cols], before head norm and RoPE. k_cache, v_cache: bf16 pages. partials: f32, the unnormalized
    output of each split (`partial_cols`). The split that contains a new position normalizes, rotates and appends its K
    and V, so that every position has one writer. A row sees `shape.window` positions up to its own. Positions that no
    row sees belong to no split.

    polls_qkv: `qkv` is a Lamport buffer. The task may poll its rows before its waits are met, however many rows there are.

    fused_partials: if an iteration has a single row that sees at most `shape.fused_combine_len` positions, its partials
    go here instead, for the `Linear` tasks that combine them. Each partial is the log of the sum of its exponentials
    (log-sum-exp), followed in bf16 by the output divided by that sum. The buffer is a Lamport buffer, published in
    whole 32-bit words. `lamport_reset`, an older buffer of the rotation (`lower/rotating.py`), is reset in every iteration.

    long_splits: a split may have more than `POSITIONS_PER_PASS` positions. GPUs then stream its keys and values through
    the pipeline like weights, ahead of the task.

    Split-KV attention with a combine: Dao et al., "Flash-Decoding" (2023); RoPE: Su et al., arXiv:2104.09864.
    """

    shape: AttentionShape = None  # type: ignore[assignment]
    qkv: Region = None  # type: ignore[assignment]
    k_cache: Region = None  # type: ignore[assignment]
    v_cache: Region = None  # type: ignore[assignment]
    page_table: Region = None  # type: ignore[assignment]
    partials: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    rope: Slab = None  # type: ignore[assignment]
    q_norm: Slab | None = None
    k_norm: Slab | None = None
    fused_partials: Region | None = None
    lamport_reset: Region | None = None
    eps: float = 0.0
    polls_qkv: bool = False
    long_splits: bool = False

    Args: ClassVar[type[ctypes.Structure]] = AttentionArgs
    polls_inputs: ClassVar[bool] = True
    counts_work_items: ClassVar[bool] = True
    loops_over_instances: ClassVar[bool] = True
    hot_variants: ClassVar[int] = 1

    def dtypes(self) -> Mapping[str, str | None]:
        caches = {"k_cache": "bf16", "v_cache": "bf16", "fused_partials": "bf16", "lamport_reset": "bf16"}
        return {"qkv": "f32", **caches, "page_table": "i32", "partials": "f32", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.qkv, self.k_cache, self.v_cache, self.page_table, self.batch)

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.k_cache, self.v_cache, self.partials, self.fused_partials, self.lamport_reset))

    def max_instances(self) -> int:
        return self.shape.num_kv * MAX_ROWS * self.shape.max_kv_splits

    def derived(self, layout: Layout) -> dict[str, Any]:
        s = self.shape
        return {
            "scores": s.scores.encode(s.head_dim),
            "num_positions": self.rope.rows,
            "qkv_stride": self.qkv.buffer.cols,
            "fused_combine_len": s.fused_combine_len if self.fused_partials else 0,
        }

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(args.num_kv * MAX_ROWS * args.max_kv_splits)

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        require(step.max_positions <= args.num_positions, "the rope table has too few positions")
        check_fixed_splits(args, step.max_positions)
        seen = most_seen(step.max_positions, args.window)
        is_long = args.kv_split_budget and seen > fewest_splits(args, step.max_slots) * POSITIONS_PER_PASS
        require(bool(args.long_splits or not is_long), "a split may be longer than long_splits says")
        check_slot_capacity(args, step)

    @classmethod
    def _check_kind(cls, args: Any) -> None:
        check_scores(args.scores, are_only_scaled=True)
        require(args.head_dim <= HOT_HEAD_DIM, f"heads of {args.head_dim} elements are a general_attention task's")

    @classmethod
    def streams(cls, args: Any) -> bool:
        return bool(args.long_splits)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        _check_attention(args)
        cls._check_kind(args)
        qkv_cols = (args.num_q + 2 * args.num_kv) * args.head_dim
        cache_bytes = 2 * args.num_pages * args.num_kv * args.page_size * args.head_dim
        part_bytes = 4 * args.num_q * num_slices(args.head_dim) * partial_cols(args.max_kv_splits)
        qkv = f32_access(False, rank, args.qkv, qkv_cols, MAX_ROWS, args.qkv_stride)
        accesses = [
            qkv._replace(early=bool(args.polls_qkv)),
            constant_access(rank, args.rope, 4 * args.head_dim, args.num_positions),
            access(False, rank, args.page_table, 4 * args.num_slots * args.max_pages, content=page_table_content(args)),
            batch_access(rank, args.batch),
            access(True, rank, args.partials, part_bytes, content=splits_content("partials", args)),
        ]
        if args.fused_partials:
            fused = access(
                True,
                rank,
                args.fused_partials,
                fused_partial_bytes(args, args.num_q),
                align_bytes=16,
                content=splits_content("fused partials", args),
            )
            accesses.append(fused)
            if args.lamport_reset:
                space, offset = split_operand(args.lamport_reset)
                accesses.append(fused._replace(space=int(space), offset=offset, clears=True))
        pages: Content = ("KV cache", args.page_size, args.num_pages, args.num_kv, args.head_dim)
        for cache in (args.k_cache, args.v_cache):
            accesses += [access(write, rank, cache, cache_bytes, content=pages) for write in (False, True)]
        accesses += [constant_access(rank, norm, 4, args.head_dim) for norm in (args.q_norm, args.k_norm) if norm]
        return accesses


@task_type(24, "general_attention")
@dataclass(frozen=True, eq=False)
class GeneralAttention(Attention):
    """`Attention` for shapes outside the consumers' hot path on GPUs: any kind of scores, and heads of more than
    HOT_HEAD_DIM elements (on GPUs up to MAX_HEAD_DIM).

    A worker computes its instances anew in each task, and the loader does not stream keys and values.
    """

    hot_variants: ClassVar[int] = 0

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        require(step.max_positions <= args.num_positions, "the rope table has too few positions")
        check_fixed_splits(args, step.max_positions)

    @classmethod
    def _check_kind(cls, args: Any) -> None:
        check_scores(args.scores)
        require(not args.long_splits, "the loader streams nothing for a general_attention task")


def attention_type(shape: AttentionShape) -> type[Attention]:
    """The task type for attention of this shape."""
    return Attention if shape.scores.are_only_scaled and shape.head_dim <= HOT_HEAD_DIM else GeneralAttention


def page_table_content(args: Any) -> Content:
    """The content of the page table, from the arguments of attention or of the scheduler step."""
    return ("page table", args.page_size, args.max_pages, args.num_pages)


def _check_attention(args: Any) -> None:
    check_splits(args)
    check_num_slots(args)
    require(args.batch != 0, "there is no batch")
    require(args.head_dim % 2 == 0, "head_dim is odd")
    require(args.page_size > 0 and not args.page_size & (args.page_size - 1), "page_size is no power of two")
    require(args.group > 0 and args.num_q > 0, "there are no query heads")
    first, last = args.q_begin // args.group, (args.q_begin + args.num_q - 1) // args.group
    require(
        args.kv_begin <= first and last < args.kv_begin + args.num_kv and args.q_begin + args.num_q < 2**32,
        "a query head has no KV head",
    )
    require((args.kv_begin + args.num_kv) * args.group < 2**32, "there are too many KV heads")
    require(args.polls_qkv <= 1 and args.long_splits <= 1, "a flag is neither 0 nor 1")
    require(args.kv_split_budget > 0 or not args.long_splits, "fixed splits are not streamed")
    require(args.kv_split_budget > 0 or not args.fused_combine_len, "fixed splits are combined by a task of their own")
    if not args.fused_partials:
        require(not args.fused_combine_len and not args.lamport_reset, "there are no fused partials")
