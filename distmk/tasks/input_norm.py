"""Input norms that are applied to activations, because the matrix behind the norm does not contain the norm's weight.

The sums of such a matrix are divided by the rms of x, but its operand is x times the norm's weight. So each task that
writes columns of x also writes bf16(x * weight) for the matrix products, and the sum of the squares of its columns. The
host twin alone does this.
"""

from __future__ import annotations

from typing import Any

from distmk.abi import InputNormArgs
from distmk.graph.regions import Region, Slab
from distmk.graph.task import Access, Layout, constant_access, f32_access, require, rows_of


def encode_input_norm(layout: Layout, norm: Slab | None, squares: Region | None) -> InputNormArgs:
    """The argument `input_norm` of a task. norm: f32, for its columns. squares: f32 [rows, 1]."""
    stride = squares.buffer.cols if squares else 0
    return InputNormArgs(weight=layout.operand(norm), squares=layout.operand(squares), squares_stride=stride)


def input_norm_accesses(args: Any, rank: int, num_cols: int) -> list[Access]:
    """Accesses: the weights of a task's `num_cols` columns are read, and the columns' sums of squares are written."""
    weight, squares, stride = args.input_norm.weight, args.input_norm.squares, args.input_norm.squares_stride
    require(bool(weight) == bool(squares), "the norm has a weight or squares, but not both")
    require(not weight or bool(args.out_bf16), "there is no out_bf16 to be multiplied by the norm's weight")
    if not weight:
        return []
    return [constant_access(rank, weight, 4, num_cols), f32_access(True, rank, squares, 1, rows_of(args.batch), stride)]
