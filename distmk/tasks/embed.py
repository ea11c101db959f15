"""The embedding lookup."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import Epilogue, InputNormArgs
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Layout, Task, batch_access, require, task_type, weight_access
from distmk.tasks.input_norm import encode_input_norm, input_norm_accesses
from distmk.tasks.linear import check_epilogue, output_accesses


class EmbedArgs(ctypes.Structure):
    _fields_ = [
        ("table", c_uint64),  # [last_token - first_token, k] in `format`: this rank's rows of the embedding
        ("out", c_uint64),
        ("out_bf16", c_uint64),  # STORE: bf16 columns of every row, the same values; 0: none
        ("lamport_reset", c_uint64),  # STORE: columns to be reset, laid out as `out_bf16`; 0: none
        ("batch", c_uint64),
        ("k", c_uint32),  # columns of the table
        ("col_begin", c_uint32),
        ("num_cols", c_uint32),  # columns of this task
        ("out_stride", c_uint32),
        ("out_bf16_stride", c_uint32),
        ("first_token", c_uint32),
        ("last_token", c_uint32),
        ("epilogue", c_uint32),  # STORE or PUSH
        ("input_norm", InputNormArgs),  # host only
        ("scale", c_float),  # factor of the rows, host only; 0: none
        ("format", c_uint32),  # format of the table (distmk/formats)
    ]


@task_type(5, "embed")
@dataclass(frozen=True, eq=False)
class Embed(Task):
    """out[row] = scale * table[token of row], columns [col_begin, col_begin + num_cols).

    table: [tokens of this rank, k], in bf16 on GPUs. Rows whose token belongs to another rank are zero, so that the sum
    over ranks is the lookup. out: f32 columns of every row (STORE), or an f32 [rows, num_cols] block in every rank's slot
    (PUSH). out_bf16, lamport_reset: see `Linear`. scale: a factor that the table does not contain. input_norm, squares:
    see `ScaledLinear`. GPUs ignore these three.
    """

    table: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region = None  # type: ignore[assignment]
    out_bf16: Region | None = None
    lamport_reset: Region | None = None
    col_begin: int = 0
    num_cols: int = 0
    first_token: int = 0
    epilogue: Epilogue = Epilogue.STORE
    num_ranks: int = 1
    input_norm: Slab | None = None
    squares: Region | None = None
    scale: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = EmbedArgs
    resets_rows: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"out": "f32", "out_bf16": "bf16", "lamport_reset": "bf16", "batch": None, "squares": "f32"}

    def reads(self) -> Iterable[Region]:
        return (self.batch,)

    def writes(self) -> Iterable[Region]:
        if self.epilogue is Epilogue.PUSH:
            return [self.out.on(rank) for rank in range(self.num_ranks)]
        return filter(None, (self.out, self.out_bf16, self.lamport_reset, self.squares))

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "k": self.table.weight.cols,
            "num_cols": self.num_cols,
            "out_stride": self.out.buffer.cols,
            "out_bf16_stride": self.out_bf16.buffer.cols if self.out_bf16 else 0,
            "last_token": self.first_token + self.table.rows,
            "scale": self.scale if self.scale != 1.0 else 0.0,
            "format": self.table.weight.format.id,
            "input_norm": encode_input_norm(layout, self.input_norm, self.squares),
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_epilogue(args)
        require(args.epilogue in (Epilogue.STORE, Epilogue.PUSH), "the epilogue is neither STORE nor PUSH")
        require(args.col_begin + args.num_cols <= args.k, "columns that the table does not have")
        require(bool(args.out_bf16 or not args.lamport_reset), "there is no out_bf16 to reset")
        require(math.isfinite(args.scale), "scale is no factor")
        num_tokens = args.last_token - args.first_token
        accesses = [weight_access(rank, args.table, args.k, num_tokens, args.format), batch_access(rank, args.batch)]
        accesses += input_norm_accesses(args, rank, args.num_cols)
        return accesses + output_accesses(args, rank, num_ranks, args.num_cols)
