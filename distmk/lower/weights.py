"""Declarations of the weights that decode tasks stream: which checkpoint rows, in which order, tiled for which tasks."""

from __future__ import annotations

from collections.abc import Iterable

from distmk.graph.graph import Graph
from distmk.graph.regions import Segment, Slab, Tiling, Weight, WeightKind
from distmk.model.config import ModelConfig
from distmk.model.nodes import Matrix
from distmk.model.rope import rotation_order
from distmk.model.shards import Range


def add_matrix(
    graph: Graph,
    name: str,
    rank: int,
    cols: int,
    segments: list[Segment],
    *,
    slabs: Iterable[Range] = (),
    tiled: bool = False,
    paired: bool = False,
    col_begin: int = 0,
    norm: str | None = None,
    norm_offset: float = 0.0,
    scale: float = 1.0,
) -> Weight:
    """A bf16 matrix of columns [col_begin, col_begin + cols) of checkpoint rows `segments`, times `scale`.

    tiled: pack the rows of each of `slabs`, one a task, in tiles; `paired`: see `Tiling`. norm: the RMSNorm before the
    matrix, whose weight, plus `norm_offset`, scales its columns.
    """
    tiling = Tiling(tuple(slabs), paired) if tiled else None
    return graph.weight(
        name,
        rank,
        cols,
        segments,
        WeightKind.MATRIX,
        col_begin,
        tiling=tiling,
        col_scale=f"{norm}.weight" if norm else None,
        offset=norm_offset,
        scale=scale,
    )


def add_vector(graph: Graph, rank: int, segments: list[Segment], *, offset: float = 0.0, scale: float = 1.0) -> Slab:
    """An f32 vector of the elements `segments` of checkpoint vectors, one after another: (element + offset) * scale."""
    weight = graph.weight(segments[0].tensor, rank, 1, segments, WeightKind.VECTOR, offset=offset, scale=scale)
    return Slab(weight, 0, weight.rows)


def rows_of(matrix: Matrix, rows: Range) -> Segment:
    """Rows `rows` of a matrix."""
    return Segment(f"{matrix.tensor}.weight", matrix.first_row + rows[0], matrix.first_row + rows[1])


def rotated_rows(config: ModelConfig, heads: Range) -> list[Range]:
    """The rows of query or key heads, each head in the order in which tasks rotate its elements."""
    d, order = config.head_dim, rotation_order(config)
    if len(order) == 1:
        return [(heads[0] * d, heads[1] * d)]
    return [(head * d + begin, head * d + end) for head in range(*heads) for begin, end in order]


def bias_of(matrix: Matrix, rows: Range) -> Segment:
    """The biases of rows `rows` of a matrix."""
    return Segment(f"{matrix.tensor}.bias", matrix.first_row + rows[0], matrix.first_row + rows[1])


def bias_rows(bias: Slab | None, begin: int, end: int) -> Slab | None:
    """Rows [begin, end) of a bias; None without one."""
    return bias and Slab(bias.weight, begin, end)
