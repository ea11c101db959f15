"""Attention of a job iteration: appends new keys and values to the KV cache, then every row attends up to its own position."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_BUCKET_ROWS, ROW_SHARE_FLOATS, ScoreArgs, check_scores
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Content, Layout, access, bf16_access, constant_access, require, task_type
from distmk.tasks.activations import JobTask, activation_access, check_batch, job_batch_accesses
from distmk.tasks.attention import page_table_content
from distmk.tasks.slots import check_num_slots, check_slot_capacity
from distmk.tasks.splits import AttentionShape, check_window

SHARES: Content = ("row shares",)
MAX_QKV_COLS = 65536  # a row of that many columns and its RoPE fit in a GPU worker's shared memory


class AppendKvArgs(ctypes.Structure):
    _fields_ = [
        ("qkv", c_uint64),  # bf16 [MAX_BUCKET_ROWS, qkv_stride], before norm and RoPE
        ("q", c_uint64),  # bf16 [MAX_BUCKET_ROWS, q_stride]
        ("q_norm", c_uint64),  # f32 [head_dim]; 0: none
        ("k_norm", c_uint64),
        ("rope", c_uint64),  # f32 [num_positions, head_dim]
        ("k_cache", c_uint64),  # bf16 [page, kv head, position in page, head_dim]
        ("v_cache", c_uint64),
        ("page_table", c_uint64),  # i32 [slot, max_pages]
        ("batch", c_uint64),
        ("num_q", c_uint32),
        ("num_kv", c_uint32),
        ("head_dim", c_uint32),
        ("page_size", c_uint32),
        ("max_pages", c_uint32),
        ("num_pages", c_uint32),
        ("num_positions", c_uint32),  # rows of the rope table
        ("qkv_stride", c_uint32),
        ("q_stride", c_uint32),
        ("eps", c_float),
        ("num_slots", c_uint32),
        ("pad", c_uint32),
    ]


@task_type(16, "append_kv")
@dataclass(frozen=True, eq=False)
class AppendKv(JobTask):
    """Head norm and RoPE of the queries and keys of a job iteration; its keys and values are appended to the KV cache.

    qkv: bf16 [MAX_BUCKET_ROWS, qkv_cols], a row's queries, keys and values. q: bf16 [MAX_BUCKET_ROWS, query columns],
    the queries normalized and rotated. Computed in float32. An instance is a row.

    RoPE: Su et al., arXiv:2104.09864.
    """

    shape: AttentionShape = None  # type: ignore[assignment]
    qkv: Region = None  # type: ignore[assignment]
    q: Region = None  # type: ignore[assignment]
    k_cache: Region = None  # type: ignore[assignment]
    v_cache: Region = None  # type: ignore[assignment]
    page_table: Region = None  # type: ignore[assignment]
    rope: Slab = None  # type: ignore[assignment]
    q_norm: Slab | None = None
    k_norm: Slab | None = None
    eps: float = 0.0

    Args: ClassVar[type[ctypes.Structure]] = AppendKvArgs
    has_prologue: ClassVar[bool] = True
    uses_pipeline: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"qkv": "bf16", "q": "bf16", "k_cache": "bf16", "v_cache": "bf16", "page_table": "i32", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.qkv, self.page_table, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.q, self.k_cache, self.v_cache)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num_positions": self.rope.rows, "qkv_stride": self.qkv.buffer.cols, "q_stride": self.q.buffer.cols}

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        require(step.max_positions <= args.num_positions, "the rope table has too few positions")
        check_slot_capacity(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        _check_heads(args)
        q_cols, qkv_cols = args.num_q * args.head_dim, (args.num_q + 2 * args.num_kv) * args.head_dim
        require(qkv_cols <= MAX_QKV_COLS, "a row has too many heads")
        accesses = [
            bf16_access(False, rank, args.qkv, qkv_cols, MAX_BUCKET_ROWS, args.qkv_stride),
            bf16_access(True, rank, args.q, q_cols, MAX_BUCKET_ROWS, args.q_stride),
            constant_access(rank, args.rope, 4 * args.head_dim, args.num_positions),
            *_cache_accesses(args, rank, write=True),
            *job_batch_accesses(rank, args.batch),
        ]
        return accesses + [constant_access(rank, norm, 4, args.head_dim) for norm in (args.q_norm, args.k_norm) if norm]


class AttentionJobsArgs(ctypes.Structure):
    _fields_ = [
        ("q", c_uint64),  # bf16 [MAX_BUCKET_ROWS, q_stride], rotated
        ("k_cache", c_uint64),  # bf16 [page, kv head, position in page, head_dim]
        ("v_cache", c_uint64),
        ("page_table", c_uint64),  # i32 [slot, max_pages]
        ("out", c_uint64),  # activations of num_q * head_dim columns
        ("batch", c_uint64),
        ("shares", c_uint64),  # f32 [num_shares, ROW_SHARE_FLOATS]; 0: none
        ("num_q", c_uint32),
        ("num_kv", c_uint32),
        ("head_dim", c_uint32),
        ("group", c_uint32),
        ("q_begin", c_uint32),
        ("kv_begin", c_uint32),
        ("page_size", c_uint32),
        ("max_pages", c_uint32),
        ("num_pages", c_uint32),
        ("q_stride", c_uint32),
        ("tiled", c_uint32),  # an ActivationLayout
        ("num_slots", c_uint32),
        ("window", c_uint32),  # positions that a row sees, its own included
        ("num_shares", c_uint32),
        ("pad", c_uint32),
        ("scores", ScoreArgs),
    ]


@task_type(17, "attention_jobs")
@dataclass(frozen=True, eq=False)
class AttentionJobs(JobTask):
    """softmax(shape.scores of q k^T) v of every row of a job iteration, over its sequence's positions up to its own.

    q: bf16 [MAX_BUCKET_ROWS, query columns], as `AppendKv` writes it. out: activations of as many columns. In a run of
    n rows that ends with kv_len positions, row i attends to the first kv_len - n + i + 1 positions, or to the last
    `shape.window` of these.

    shares: f32 [workers, ROW_SHARE_FLOATS], zeros when a launch begins. Workers that share a sequence's positions leave
    partials there. None: a worker attends to all positions of a row and a KV head.

    An instance is a block of rows of one run and one query head or a group of heads, as the backend divides them.
    max_instances is an upper bound.

    Dao, "FlashAttention-2", arXiv:2307.08691.
    """

    shape: AttentionShape = None  # type: ignore[assignment]
    q: Region = None  # type: ignore[assignment]
    k_cache: Region = None  # type: ignore[assignment]
    v_cache: Region = None  # type: ignore[assignment]
    page_table: Region = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    shares: Region | None = None
    tiled: int = 0  # an ActivationLayout

    Args: ClassVar[type[ctypes.Structure]] = AttentionJobsArgs
    has_prologue: ClassVar[bool] = True
    uses_pipeline: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        caches: dict[str, str | None] = {"k_cache": "bf16", "v_cache": "bf16", "page_table": "i32"}
        return caches | {"q": "bf16", "out": "bf16", "shares": "f32", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.q, self.k_cache, self.v_cache, self.page_table, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.out, *([self.shares] if self.shares else []))

    def max_instances(self) -> int:
        return MAX_BUCKET_ROWS * self.shape.num_q

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "q_stride": self.q.buffer.cols,
            "num_shares": self.shares.buffer.rows if self.shares else 0,
            "scores": self.shape.scores.encode(self.shape.head_dim),
        }

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(MAX_BUCKET_ROWS * args.num_q)

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_slot_capacity(args, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        _check_heads(args)
        require(args.group > 0, "there are no query heads")
        check_window(args)
        check_scores(args.scores)
        first, last = args.q_begin // args.group, (args.q_begin + args.num_q - 1) // args.group
        require(
            args.kv_begin <= first and last < args.kv_begin + args.num_kv and args.q_begin + args.num_q < 2**32,
            "a query head has no KV head",
        )
        q_cols = args.num_q * args.head_dim
        shares = 4 * ROW_SHARE_FLOATS * args.num_shares
        return [
            *([access(True, rank, args.shares, shares, align_bytes=16, content=SHARES)] if shares else []),
            bf16_access(False, rank, args.q, q_cols, MAX_BUCKET_ROWS, args.q_stride),
            activation_access(True, rank, args.out, q_cols, args.tiled),
            *_cache_accesses(args, rank, write=False),
            *job_batch_accesses(rank, args.batch),
        ]


def _check_heads(args: Any) -> None:
    check_batch(args)
    check_num_slots(args)
    require(args.head_dim > 0 and args.head_dim % 2 == 0, "head_dim is odd")
    require(args.page_size > 0 and not args.page_size & (args.page_size - 1), "page_size is no power of two")
    require(args.num_q > 0 and args.num_kv > 0, "there are no heads")


def _cache_accesses(args: Any, rank: int, write: bool) -> list[Access]:
    num_bytes = 2 * args.num_pages * args.num_kv * args.page_size * args.head_dim
    pages: Content = ("KV cache", args.page_size, args.num_pages, args.num_kv, args.head_dim)
    table = access(False, rank, args.page_table, 4 * args.num_slots * args.max_pages, content=page_table_content(args))
    return [table, *(access(write, rank, cache, num_bytes, content=pages) for cache in (args.k_cache, args.v_cache))]
