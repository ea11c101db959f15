"""Weight-streaming tasks: linear layers with their prologue and epilogues, and the embedding lookup."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_ROWS, Candidate, Epilogue
from distmk.regions import Region, Slab
from distmk.tasks.base import Access, Layout, Task, access, batch_access, rows_of, task_type


def output_accesses(args: Any, rank: int, num_ranks: int, num_cols: int) -> list[Access]:
    """What an epilogue writes: a block in every rank's slot (PUSH), or columns of every row."""
    rows = rows_of(args.batch)
    if args.epilogue == Epilogue.PUSH:
        return [access(True, d, args.out, 4 * num_cols * rows) for d in range(num_ranks)]
    found = [access(True, rank, args.out, 4 * num_cols, rows, 4 * args.out_stride)]
    if args.epilogue == Epilogue.ADD:
        found.append(found[0]._replace(write=False))
    return found


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # f32 [rows, k]
        ("norm", c_uint64),  # f32 [k]: weight of an RMSNorm of x; 0: none
        ("weight", c_uint64),  # bf16 [n, k] ([2n, k] for SWIGLU: gate rows, then up rows)
        ("bias", c_uint64),  # f32 [n or 2n]; 0: none
        ("out", c_uint64),
        ("batch", c_uint64),
        ("logits", c_uint64),  # ARGMAX: f32 [rows, vocabulary shard]; 0: not kept
        ("k", c_uint32),
        ("n", c_uint32),
        ("x_stride", c_uint32),  # elements
        ("out_stride", c_uint32),
        ("epilogue", c_uint32),
        ("eps", c_float),
        ("first_token", c_uint32),  # ARGMAX: token id of the first row
        ("logits_stride", c_uint32),
        ("k_pitch", c_uint32),  # elements of a row of the weight: k, or more where rows are packed in tiles
        ("pad", c_uint32),
    ]


@task_type(4, "linear")
@dataclass(frozen=True, eq=False)
class Linear(Task):
    """out = epilogue(norm(x) @ slab.T + bias): bf16 weights, float32 accumulation.

    x: f32 [rows, k]. out: f32 columns of every row (STORE, ADD, SWIGLU), a [rows, n] block in every rank's slot (PUSH),
    or one Candidate a row (ARGMAX; only rows that are sampled).

    x (times the norm's weight, in float32) is rounded to bf16, to nearest and ties to even, before it is multiplied. Where
    there is a norm the float32 sums are multiplied by 1/rms of the unrounded x; then come bias and epilogue.

    RMSNorm: Zhang and Sennrich, arXiv:1910.07467; SwiGLU: Shazeer, arXiv:2002.05202.
    """

    x: Region = None  # type: ignore[assignment]
    slab: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region | None = None
    norm: Slab | None = None
    bias: Slab | None = None
    epilogue: Epilogue = Epilogue.STORE
    eps: float = 0.0
    num_ranks: int = 1
    first_token: int = 0
    logits: Region | None = None

    Args: ClassVar[type[ctypes.Structure]] = LinearArgs
    streams_weights: ClassVar[bool] = True

    def reads(self) -> Iterable[Region]:
        yield self.x
        if self.batch:
            yield self.batch
        if self.epilogue is Epilogue.ADD:
            yield self.out

    def writes(self) -> Iterable[Region]:
        if self.epilogue is Epilogue.PUSH:
            return [self.out.on(rank) for rank in range(self.num_ranks)]
        return (self.out, self.logits) if self.logits else (self.out,)

    def weight_bytes(self) -> int:
        return self.slab.num_bytes

    def encode(self, layout: Layout) -> ctypes.Structure:
        return LinearArgs(
            x=layout.operand(self.x),
            norm=layout.operand(self.norm),
            weight=layout.operand(self.slab),
            bias=layout.operand(self.bias),
            out=layout.operand(self.out),
            batch=layout.operand(self.batch),
            logits=layout.operand(self.logits),
            k=self.x.cols,
            k_pitch=self.slab.weight.row_bytes // 2,
            n=self.slab.rows // 2 if self.epilogue is Epilogue.SWIGLU else self.slab.rows,
            x_stride=self.x.buffer.cols,
            out_stride=self.out.buffer.cols,
            epilogue=int(self.epilogue),
            eps=self.eps,
            first_token=self.first_token,
            logits_stride=self.logits.buffer.cols if self.logits else 0,
        )

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        rows, halves = rows_of(args.batch), 2 if args.epilogue == Epilogue.SWIGLU else 1
        found = [
            access(False, rank, args.x, 4 * args.k, rows, 4 * args.x_stride),
            access(False, rank, args.weight, 2 * args.k_pitch * args.n * halves),
        ]
        if args.norm:
            found.append(access(False, rank, args.norm, 4 * args.k))
        if args.bias:
            found.append(access(False, rank, args.bias, 4 * args.n * halves))
        if args.batch:
            found.append(batch_access(rank, args.batch))
        if args.epilogue == Epilogue.ARGMAX:
            found.append(access(True, rank, args.out, ctypes.sizeof(Candidate) * MAX_ROWS))
            if args.logits:
                found.append(access(True, rank, args.logits, 4 * args.n, rows, 4 * args.logits_stride))
            return found
        return found + output_accesses(args, rank, num_ranks, args.n)


class EmbedArgs(ctypes.Structure):
    _fields_ = [
        ("table", c_uint64),  # bf16 [last_token - first_token, k]: this rank's rows of the embedding
        ("out", c_uint64),
        ("batch", c_uint64),
        ("k", c_uint32),  # columns of the table
        ("col_begin", c_uint32),
        ("n", c_uint32),  # columns of this task
        ("out_stride", c_uint32),
        ("first_token", c_uint32),
        ("last_token", c_uint32),
        ("epilogue", c_uint32),  # STORE or PUSH
        ("pad", c_uint32),
    ]


@task_type(5, "embed")
@dataclass(frozen=True, eq=False)
class Embed(Task):
    """out[row] = table[token of row]: zeros where the token is another rank's, so that a sum over ranks is the lookup."""

    table: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    col_begin: int = 0
    num_cols: int = 0
    first_token: int = 0
    epilogue: Epilogue = Epilogue.STORE
    num_ranks: int = 1

    Args: ClassVar[type[ctypes.Structure]] = EmbedArgs

    def reads(self) -> Iterable[Region]:
        return (self.batch,)

    def writes(self) -> Iterable[Region]:
        if self.epilogue is Epilogue.PUSH:
            return [self.out.on(rank) for rank in range(self.num_ranks)]
        return (self.out,)

    def encode(self, layout: Layout) -> ctypes.Structure:
        return EmbedArgs(
            table=layout.operand(self.table),
            out=layout.operand(self.out),
            batch=layout.operand(self.batch),
            k=self.table.weight.cols,
            col_begin=self.col_begin,
            n=self.num_cols,
            out_stride=self.out.buffer.cols,
            first_token=self.first_token,
            last_token=self.first_token + self.table.rows,
            epilogue=int(self.epilogue),
        )

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        table_bytes = 2 * args.k * (args.last_token - args.first_token)
        found = [access(False, rank, args.table, table_bytes), batch_access(rank, args.batch)]
        return found + output_accesses(args, rank, num_ranks, args.n)
