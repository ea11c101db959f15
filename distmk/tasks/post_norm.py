"""The RMSNorm between a row-parallel projection and the residual stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import InputNormArgs
from distmk.graph.regions import Region, Slab
from distmk.graph.task import (
    Access,
    Layout,
    Task,
    batch_access,
    constant_access,
    f32_access,
    require,
    rows_of,
    task_type,
    vector_accesses,
)
from distmk.tasks.input_norm import encode_input_norm, input_norm_accesses


class PostNormArgs(ctypes.Structure):
    _fields_ = [
        ("y", c_uint64),  # f32 [rows, k]
        ("weight", c_uint64),  # f32 [n], for this task's columns
        ("x", c_uint64),  # f32 columns of every row
        ("out_bf16", c_uint64),  # bf16 columns of every row, x rounded; 0: none
        ("lamport_reset", c_uint64),  # columns to be reset, laid out as `out_bf16`; 0: none
        ("batch", c_uint64),
        ("k", c_uint32),
        ("col_begin", c_uint32),  # this task's first column of y
        ("num_cols", c_uint32),  # columns of this task
        ("y_stride", c_uint32),  # elements
        ("x_stride", c_uint32),
        ("out_bf16_stride", c_uint32),
        ("eps", c_float),
        ("pad", c_uint32),
        ("input_norm", InputNormArgs),  # host only
    ]


@task_type(22, "post_norm")
@dataclass(frozen=True, eq=False)
class PostNorm(Task):
    """x += y / rms(y) * weight, columns [col_begin, col_begin + columns of x) of y; float32.

    y: f32 [rows, k], whole rows; every task computes their root mean square for itself. weight: f32, for the task's
    columns. x: f32 columns of every row. out_bf16: the same columns rounded to bf16, for tasks that multiply them.
    lamport_reset: see `Linear`. input_norm, squares: see `ScaledLinear`; GPUs ignore them.
    """

    y: Region = None  # type: ignore[assignment]
    weight: Slab = None  # type: ignore[assignment]
    x: Region = None  # type: ignore[assignment]
    out_bf16: Region | None = None
    lamport_reset: Region | None = None
    batch: Region | None = None
    col_begin: int = 0
    eps: float = 0.0
    input_norm: Slab | None = None
    squares: Region | None = None

    Args: ClassVar[type[ctypes.Structure]] = PostNormArgs
    resets_rows: ClassVar[bool] = True

    def dtypes(self) -> Mapping[str, str | None]:
        return {"y": "f32", "x": "f32", "out_bf16": "bf16", "lamport_reset": "bf16", "squares": "f32"}

    def reads(self) -> Iterable[Region]:
        return filter(None, (self.y, self.x, self.batch))

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.x, self.out_bf16, self.lamport_reset, self.squares))

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {
            "k": self.y.cols,
            "num_cols": self.x.cols,
            "y_stride": self.y.buffer.cols,
            "x_stride": self.x.buffer.cols,
            "out_bf16_stride": self.out_bf16.buffer.cols if self.out_bf16 else 0,
            "input_norm": encode_input_norm(layout, self.input_norm, self.squares),
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.col_begin + args.num_cols <= args.k, "columns that y does not have")
        require(bool(args.out_bf16 or not args.lamport_reset), "there is no out_bf16 to reset")
        require(args.y != args.x, "y is the output")
        rows = rows_of(args.batch)
        x = f32_access(True, rank, args.x, args.num_cols, rows, args.x_stride)
        accesses = [
            f32_access(False, rank, args.y, args.k, rows, args.y_stride),
            constant_access(rank, args.weight, 4, args.num_cols),
            x,
            x._replace(write=False),
            *input_norm_accesses(args, rank, args.num_cols),
        ]
        if args.out_bf16:
            accesses += vector_accesses(
                rank, args.out_bf16, args.lamport_reset, args.num_cols, rows, args.out_bf16_stride
            )
        if args.batch:
            accesses.append(batch_access(rank, args.batch))
        return accesses
