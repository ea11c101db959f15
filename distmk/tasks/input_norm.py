"""What tasks that write the residual stream leave for an operator whose matrices do not have the weight of its norm.

The sums of such a matrix are divided by the rms of x, but its operand is x times the norm's weight. So each task that writes
columns of x writes bf16(x * weight) for the products, and the sum of the squares of its columns beside it. On the host twin.
"""

from __future__ import annotations

from typing import Any

from distmk.abi import InputNormArgs
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Layout, constant_access, f32_access, require, rows_of


def encode_input_norm(layout: Layout, norm: Slab | None, squares: Region | None) -> InputNormArgs:
    """The argument `input_norm` of a task. norm: f32, of its columns. squares: f32 [rows, 1]."""
    stride = squares.buffer.cols if squares else 0
    return InputNormArgs(weight=layout.operand(norm), squares=layout.operand(squares), squares_stride=stride)


def input_norm_accesses(args: Any, rank: int, num_cols: int) -> list[Access]:
    """The read of the weight of a task's `num_cols` columns, and the write of their sums of squares."""
    weight, squares, stride = args.input_norm.weight, args.input_norm.squares, args.input_norm.squares_stride
    require(bool(weight) == bool(squares), "the norm has a weight or squares, but not both")
    require(not weight or bool(args.out_bf16), "there is no out_bf16 to be multiplied by the norm's weight")
    if not weight:
        return []
    return [constant_access(rank, weight, 4, num_cols), f32_access(True, rank, squares, 1, rows_of(args.batch), stride)]
