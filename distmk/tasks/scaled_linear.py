"""Linear layers whose matrices do not contain the scale factors of the layers around them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import InputNormArgs
from distmk.errors import UsageError
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Layout, constant_access, f32_access, require, rows_of, task_type
from distmk.tasks.input_norm import encode_input_norm, input_norm_accesses
from distmk.tasks.linear import Linear, product_accesses


class ScaledLinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # fields without a comment: see LinearArgs
        ("weight", c_uint64),
        ("bias", c_uint64),
        ("out", c_uint64),
        ("out_bf16", c_uint64),
        ("lamport_reset", c_uint64),
        ("batch", c_uint64),
        ("logits", c_uint64),
        ("x_squares", c_uint64),  # f32 [rows, num_squares], which add up to a row's sum of squares; 0: none
        ("order", c_uint64),  # i32 [k]: column j of the weight multiplies element order[j] of x; 0: element j
        ("input_norm", InputNormArgs),  # norm of the operator that reads `out`
        ("k", c_uint32),
        ("num_features", c_uint32),
        ("x_stride", c_uint32),
        ("out_stride", c_uint32),
        ("out_bf16_stride", c_uint32),
        ("epilogue", c_uint16),
        ("keeps_logits", c_uint16),
        ("eps", c_float),
        ("first_token", c_uint32),
        ("logits_stride", c_uint32),
        ("k_pitch", c_uint32),
        ("softcap", c_float),
        ("scale", c_float),  # factor of x @ weight.T
        ("x_squares_stride", c_uint16),
        ("num_squares", c_uint16),
        ("format", c_uint16),
        ("lead", c_uint16),
    ]


@task_type(25, "scaled_linear")
@dataclass(frozen=True, eq=False)
class ScaledLinear(Linear):
    """`Linear` with a matrix that factors cannot be folded into: out = epilogue(scale * x @ slab.T / rms + bias).

    Host twin only.

    x_squares: f32 columns of every row: the sums of squares of parts of the row before its norm. The rms is computed
    from them, and x is that row times the norm's weight. None: rms is 1.

    input_norm, squares: for the norm of the next layer. input_norm: f32, for the task's columns; out_bf16 is then
    bf16(out * input_norm). squares: an f32 column of every row, the sum of squares of out.

    order: i32 [k]. Column j of the slab multiplies element order[j] of x.

    The task neither polls nor combines a row's splits.
    """

    scale: float = 1.0
    x_squares: Region | None = None
    input_norm: Slab | None = None
    squares: Region | None = None
    order: Slab | None = None

    Args: ClassVar[type[ctypes.Structure]] = ScaledLinearArgs
    on_device: ClassVar[bool] = False
    streams_weights: ClassVar[bool] = False
    polls_inputs: ClassVar[bool] = False
    resets_rows: ClassVar[bool] = False
    hot_variants: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Raises UsageError for features that only `Linear` has."""
        if self.applies_rms or self.polls_x or self.fused_partials:
            raise UsageError(f"task {self.op} is normalized by x_squares, without polling or a fused combine")

    def dtypes(self) -> Mapping[str, str | None]:
        return {**super().dtypes(), "x_squares": "f32", "squares": "f32"}

    def reads(self) -> Iterable[Region]:
        return filter(None, (*super().reads(), self.x_squares))

    def writes(self) -> Iterable[Region]:
        return filter(None, (*super().writes(), self.squares))

    def derived(self, layout: Layout) -> dict[str, Any]:
        return super().derived(layout) | {
            "x_squares_stride": self.x_squares.buffer.cols if self.x_squares else 0,
            "num_squares": self.x_squares.cols if self.x_squares else 0,
            "input_norm": encode_input_norm(layout, self.input_norm, self.squares),
        }

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(math.isfinite(args.scale), "scale is no factor")
        require(bool(args.x_squares) == bool(args.num_squares), "there are no squares, or they have no columns")
        accesses = [*product_accesses(args, rank, num_ranks), *input_norm_accesses(args, rank, args.num_features)]
        if args.order:
            accesses.append(constant_access(rank, args.order, 4, args.k))
        if not args.x_squares:
            return accesses
        stride = args.x_squares_stride
        return [*accesses, f32_access(False, rank, args.x_squares, args.num_squares, rows_of(args.batch), stride)]
