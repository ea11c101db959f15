"""Tasks of a job iteration that work on one row at a time: the embedding, and sums into the residual stream."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_K_SPLITS, ActivationLayout
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Layout, constant_access, f32_access, require, task_type, weight_access
from distmk.tasks.activations import JobTask, RowSet, activation_access, check_batch, job_batch_accesses, owned_rows


class EmbedRowsArgs(ctypes.Structure):
    _fields_ = [
        ("table", c_uint64),  # [last_token - first_token, k] in `format`
        ("out", c_uint64),  # f32 [owned rows, out_stride], beginning at this rank's part
        ("batch", c_uint64),
        ("k", c_uint32),
        ("out_stride", c_uint32),
        ("first_token", c_uint32),
        ("last_token", c_uint32),
        ("scale", c_float),  # factor of the rows, host only; 0: none
        ("format", c_uint32),  # format of the table (distmk/formats)
    ]


@task_type(18, "embed_rows")
@dataclass(frozen=True, eq=False)
class EmbedRows(JobTask):
    """out[row] = scale * table[token of row], float32, in this rank's part on the row's owner (`LinearJobs`, PARTS).

    scale: a factor that the table does not contain; GPUs ignore it.

    table: [tokens of this rank, k], in bf16 on GPUs. Rows whose token belongs to another rank are zero. An instance is a row.
    """

    table: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    first_token: int = 0
    num_ranks: int = 1
    scale: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = EmbedRowsArgs
    writes_peers: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"out": "f32", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.batch,)

    def writes(self) -> Iterable[Region]:
        return [self.out.on(rank) for rank in range(self.num_ranks)]

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "k": self.table.weight.cols,
            "out_stride": self.out.buffer.cols,
            "last_token": self.first_token + self.table.rows,
            "scale": self.scale if self.scale != 1.0 else 0.0,
            "format": self.table.weight.format.id,
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_batch(args)
        require(args.first_token < args.last_token, "there are no tokens")
        require(math.isfinite(args.scale), "scale is no factor")
        table = weight_access(rank, args.table, args.k, args.last_token - args.first_token, args.format)
        rows = owned_rows(num_ranks)
        out = [f32_access(True, r, args.out, args.k, rows, args.out_stride) for r in range(num_ranks)]
        return [table, *out, *job_batch_accesses(rank, args.batch)]


class ReduceRowsArgs(ctypes.Structure):
    _fields_ = [
        ("parts", c_uint64),  # f32 [owned rows, parts * k]
        ("x", c_uint64),  # f32 [owned rows, k], the residual stream
        ("out", c_uint64),  # activations of k columns; 0: none
        ("batch", c_uint64),
        ("k", c_uint32),
        ("parts_stride", c_uint32),  # elements of a row of `parts`
        ("num_ranks", c_uint32),
        ("parts_per_rank", c_uint32),
        ("num_k_splits", c_uint32),  # parts of each rank that are added up: its first ones
        ("accumulates", c_uint32),
        ("tiled", c_uint32),
        ("eps", c_float),
        ("post_norm", c_uint64),  # f32 [k]; 0: none
        ("skips_rms", c_uint32),  # 1: out is x itself
        ("pad", c_uint32),
        ("input_norm", c_uint64),  # f32 [k], factors of lane_out, or of out on the host; 0: none
        ("lane_out", c_uint64),  # activations of k columns in LANE_TILES; 0: none
    ]


@task_type(19, "reduce_rows")
@dataclass(frozen=True, eq=False)
class ReduceRows(JobTask):
    """For the rows that this rank owns: x (+)= sum of the parts, rank by rank and split by split; out = x / rms(x).

    parts: f32 [owned rows, parts * k] (`LinearJobs`, PARTS).
    x: f32 [owned rows, k].
    out: activations of k columns, on every rank. If not applies_rms: x itself.
    lane_out: out * input_norm in LANE_TILES, on every rank, for packed weights. It takes the place of out, or stands
      beside it.
    input_norm: f32 [k]. The weight of the RMSNorm is usually folded into the columns of the matrix that multiplies
      out (`Weight.col_scale`). If it is not, the host twin multiplies out by input_norm, and GPUs multiply lane_out.
    post_norm: f32 [k]. The sum is divided by its rms and multiplied by this weight before it is added to x or
      replaces it.

    An instance is a row.
    """

    parts: Region = None  # type: ignore[assignment]
    x: Region = None  # type: ignore[assignment]
    out: Region | None = None
    lane_out: Region | None = None
    num_ranks: int = 1
    num_k_splits: int = 1
    accumulates: bool = False
    tiled: bool = False
    eps: float = 0.0
    post_norm: Slab | None = None
    applies_rms: bool = True
    input_norm: Slab | None = None
    rows: RowSet = RowSet.OWNED

    Args: ClassVar[type[ctypes.Structure]] = ReduceRowsArgs
    has_prologue: ClassVar[bool] = True
    uses_pipeline: ClassVar[bool] = True
    writes_peers: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"parts": "f32", "x": "f32", "out": "bf16", "lane_out": "bf16", "batch": None}

    def reads(self) -> Iterable[Region]:
        yield self.parts
        yield self.batch
        if self.accumulates:
            yield self.x

    def writes(self) -> Iterable[Region]:
        return [self.x, *self.owned_writes()]

    def owned_writes(self) -> Iterable[Region]:
        outputs = filter(None, (self.out, self.lane_out))
        return [out.on(rank) for out in outputs for rank in range(self.num_ranks)]

    def derived(self, layout: Layout) -> dict[str, Any]:
        k = self.x.cols
        return {
            "k": k,
            "parts_stride": self.parts.buffer.cols,
            "parts_per_rank": self.parts.buffer.cols // (k * self.num_ranks),
            "skips_rms": int(not self.applies_rms),
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_batch(args)
        require(args.num_ranks == num_ranks, "num_ranks is not that of the program")
        require(args.accumulates <= 1 and args.skips_rms <= 1, "a flag is neither 0 nor 1")
        require(bool(args.out or args.lane_out), "there is no output")
        require(args.tiled or not args.lane_out, "lane_out is of GPUs alone")
        has_norm = not args.skips_rms and (args.lane_out or not args.tiled)
        require(not args.input_norm or has_norm, "x itself, or out of a GPU, has no norm")
        require(1 <= args.num_k_splits <= args.parts_per_rank <= MAX_K_SPLITS, "num_k_splits is out of range")
        require(args.parts_stride == num_ranks * args.parts_per_rank * args.k, "parts_stride is not that of the parts")
        rows = owned_rows(num_ranks)
        x = f32_access(True, rank, args.x, args.k, rows, args.k)
        parts = (args.parts + 4 * args.k * args.parts_per_rank * source for source in range(num_ranks))
        accesses = [
            f32_access(False, rank, part, args.k * args.num_k_splits, rows, args.parts_stride) for part in parts
        ]
        outputs = ((args.out, args.tiled), (args.lane_out, ActivationLayout.LANE_TILES))
        for operand, layout in ((operand, layout) for operand, layout in outputs if operand):
            out = (activation_access(True, r, operand, args.k, layout) for r in range(num_ranks))
            accesses += [each._replace(owner=rank) for each in out]
        accesses.append(x)
        if args.accumulates:
            accesses.append(x._replace(write=False))
        accesses += [constant_access(rank, norm, 4, args.k) for norm in (args.post_norm, args.input_norm) if norm]
        return [*accesses, *job_batch_accesses(rank, args.batch)]
