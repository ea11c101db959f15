"""The matrix products of a model: the checkpoint rows of each rank's matrix, and how tasks divide these rows.

The programs of all buckets multiply the same matrices, packed for one task per slab (`Weight.tiling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmk.abi import Epilogue
from distmk.graph.graph import Graph
from distmk.graph.partition import Partition
from distmk.graph.regions import Region, Segment, Slab, Tiling, Weight, WeightKind
from distmk.lower.plan import WorkPlan
from distmk.model.nn import ACTIVATIONS
from distmk.model.nodes import Matrix
from distmk.model.operators import Embedding, Head, Mlp, Operator, SelfAttention
from distmk.model.rope import rotation_order
from distmk.model.shards import Range
from distmk.tasks import Linear, ScaledLinear

Rows = list[tuple[Matrix, Range]]


@dataclass(frozen=True)
class Product:
    """epilogue(x @ weight.T + bias) on each rank, with the rank's own matrix.

    If `applies_rms`, x / rms(x) takes the place of x.

    Tuples are by rank.
    biases: f32; None: no bias.
    partitions: rows of the matrix, by slab.
    scale: a factor of x @ weight.T that is folded into the bias but not into the matrix.
    """

    name: str
    weights: tuple[Weight, ...]
    biases: tuple[Slab | None, ...]
    partitions: tuple[Partition, ...]
    epilogue: Epilogue = Epilogue.STORE
    applies_rms: bool = False
    scale: float = 1.0

    def whole(self, rank: int) -> Slab:
        """All rows of a rank's matrix."""
        return Slab(self.weights[rank], 0, self.weights[rank].rows)


def slab_task(
    plan: WorkPlan, product: Product, rank: int, rows: Range, *, x_squares: Region | None = None, **operands: Any
) -> Linear:
    """The task of slab `rows` of a rank's matrix. x_squares: of x, if the norm's weight is not folded into the matrix."""
    bias = product.biases[rank]
    operands |= {
        "rank": rank,
        "op": product.name,
        "slab": Slab(product.weights[rank], *rows),
        "bias": bias and Slab(bias.weight, *rows),
    }
    if plan.options.folds_factors:
        return Linear(**operands, applies_rms=product.applies_rms)
    return ScaledLinear(**operands, scale=product.scale, x_squares=x_squares)


def embedding_tables(graph: Graph, plan: WorkPlan, op: Embedding) -> tuple[Slab, ...]:
    """Each rank's rows of the embedding, times its scale.

    The scale is always folded in: a table is looked up and never packed.
    """
    hidden = plan.config.hidden_size
    return tuple(
        Slab(
            graph.weight(
                op.table, rank, hidden, [Segment(f"{op.table}.weight", *vocab)], WeightKind.MATRIX, scale=op.scale
            ),
            0,
            vocab[1] - vocab[0],
        )
        for rank, vocab in enumerate(shard.vocab for shard in plan.shards)
    )


def qkv_product(graph: Graph, plan: WorkPlan, op: SelfAttention) -> Product:
    """Queries, keys and values of norm(x), column-parallel."""
    rows = [_qkv_rows(plan, op, rank) for rank in plan.ranks]
    return _column_parallel(graph, plan, f"{op.name}.qkv", rows, plan.qkv, op, bias=op.q.bias)


def gate_up_product(graph: Graph, plan: WorkPlan, op: Mlp) -> Product:
    """activation(gate(norm(x))) * up(norm(x)), column-parallel. A slab has its gate rows first, then as many up rows."""
    rows = [_gate_up_rows(plan, op, rank) for rank in plan.ranks]
    partitions = tuple(partition.paired for partition in plan.mlp)
    epilogue = ACTIVATIONS[op.activation]
    return _column_parallel(graph, plan, f"{op.name}.gate_up", rows, partitions, op, epilogue, bias=op.gate.bias)


def o_product(graph: Graph, plan: WorkPlan, op: SelfAttention) -> Product:
    """A rank's terms of attention's o projection, row-parallel."""
    d = plan.config.head_dim
    cols = [(shard.heads[0] * d, shard.heads[1] * d) for shard in plan.shards]
    return _row_parallel(graph, plan, f"{op.name}.o", op.o, cols, plan.o)


def down_product(graph: Graph, plan: WorkPlan, op: Mlp) -> Product:
    """A rank's terms of the MLP's down projection, row-parallel."""
    return _row_parallel(graph, plan, f"{op.name}.down", op.down, [shard.mlp for shard in plan.shards], plan.down)


def head_product(graph: Graph, plan: WorkPlan, op: Head) -> Product:
    """The logits of norm(x), vocabulary-parallel."""
    rows = [[Segment(f"{op.table}.weight", *shard.vocab)] for shard in plan.shards]
    weights = tuple(
        _matrix(graph, plan, "head", rank, rows[rank], plan.head[rank], op, scale=op.scale) for rank in plan.ranks
    )
    return Product(
        "head", weights, (None,) * len(weights), plan.head, applies_rms=True, scale=_scale_left(plan, op.scale)
    )


def post_norms(graph: Graph, plan: WorkPlan, op: SelfAttention | Mlp) -> tuple[Slab | None, ...]:
    """The weight of the norm after an operator's projection, on each rank; None without such a norm."""
    return _norms(graph, plan, op.post_norm, op.norm_offset)


def input_norms(graph: Graph, plan: WorkPlan, op: Operator | None) -> tuple[Slab | None, ...]:
    """The weight of the norm before an operator, on each rank; None without a norm, or if it is folded into the matrices."""
    if plan.options.folds_factors or op is None or isinstance(op, Embedding):
        return (None,) * len(plan.ranks)
    return _norms(graph, plan, op.norm, op.norm_offset)


def head_norm(graph: Graph, plan: WorkPlan, rank: int, tensor: str | None, offset: float) -> Slab | None:
    """The weight of the norm of a query or key head, in the order of the head's rows; None without such a norm."""
    segments = [Segment(f"{tensor}.weight", begin, end) for begin, end in _rotated_rows(plan, (0, 1))]
    return _vector(graph, rank, segments, offset=offset) if tensor else None


def _column_parallel(
    graph: Graph,
    plan: WorkPlan,
    name: str,
    rows: list[Rows],
    partitions: tuple[Partition, ...],
    op: SelfAttention | Mlp,
    epilogue: Epilogue = Epilogue.STORE,
    *,
    bias: bool,
) -> Product:
    """rows: by rank, the parts of matrices that make up its matrix."""
    weights, biases = [], []
    for rank in plan.ranks:
        segments = [_segment(matrix, "weight", part) for matrix, part in rows[rank]]
        paired = epilogue is not Epilogue.STORE
        weights.append(_matrix(graph, plan, name, rank, segments, partitions[rank], op, paired=paired))
        of_rows = [_segment(matrix, "bias", part) for matrix, part in rows[rank]]
        biases.append(_vector(graph, rank, of_rows) if bias else None)
    return Product(name, tuple(weights), tuple(biases), partitions, epilogue, op.norm is not None)


def _row_parallel(
    graph: Graph, plan: WorkPlan, name: str, matrix: Matrix, cols: list[Range], partition: Partition
) -> Product:
    """cols: by rank, its columns of the matrix. Rank 0 alone adds the bias."""
    hidden = (0, plan.config.hidden_size)
    weights, biases = [], []
    for rank in plan.ranks:
        segments = [_segment(matrix, "weight", hidden)]
        weights.append(_matrix(graph, plan, name, rank, segments, partition, cols=cols[rank], scale=matrix.scale))
        of_rows = [_segment(matrix, "bias", hidden)]
        has_bias = matrix.bias and rank == 0
        biases.append(_vector(graph, rank, of_rows, scale=matrix.scale) if has_bias else None)
    partitions = (partition,) * len(weights)
    return Product(name, tuple(weights), tuple(biases), partitions, scale=_scale_left(plan, matrix.scale))


def _scale_left(plan: WorkPlan, scale: float) -> float:
    """The scale of a matrix, if it is not folded into the matrix; else 1."""
    return 1.0 if plan.options.folds_factors else scale


def _norms(graph: Graph, plan: WorkPlan, norm: str | None, offset: float) -> tuple[Slab | None, ...]:
    """The weight of a norm of the residual stream, on each rank; None without one."""
    segments = [Segment(f"{norm}.weight", 0, plan.config.hidden_size)]
    return tuple(_vector(graph, rank, segments, offset=offset) if norm else None for rank in plan.ranks)


def _matrix(
    graph: Graph,
    plan: WorkPlan,
    name: str,
    rank: int,
    segments: list[Segment],
    partition: Partition,
    op: SelfAttention | Mlp | Head | None = None,
    *,
    cols: Range | None = None,
    paired: bool = False,
    scale: float = 1.0,
) -> Weight:
    """A matrix of one rank. cols: columns of the checkpoint's matrix; None: all.

    If the plan folds factors, the matrix is multiplied by `scale`, and its columns by the weight of the norm of `op`.
    """
    begin, end = cols or (0, plan.config.hidden_size)
    folds = plan.options.folds_factors
    norm = op.norm if op and folds else None
    return graph.weight(
        name,
        rank,
        end - begin,
        segments,
        WeightKind.MATRIX,
        begin,
        tiling=Tiling(partition.ranges, paired) if plan.options.tiled else None,
        col_scale=f"{norm}.weight" if norm else None,
        offset=op.norm_offset if op and folds else 0.0,
        scale=scale if folds else 1.0,
        format=plan.options.matrix_format,
    )


def _vector(graph: Graph, rank: int, segments: Sequence[Segment], *, offset: float = 0.0, scale: float = 1.0) -> Slab:
    """An f32 vector made of the elements `segments` of checkpoint vectors, one after another: (element + offset) * scale."""
    name = segments[0].tensor
    weight = graph.weight(name, rank, 1, list(segments), WeightKind.VECTOR, offset=offset, scale=scale)
    return Slab(weight, 0, weight.rows)


def _segment(matrix: Matrix, kind: str, rows: Range) -> Segment:
    """Rows of a matrix (`kind` is "weight"), or the biases of these rows ("bias")."""
    return Segment(f"{matrix.tensor}.{kind}", matrix.first_row + rows[0], matrix.first_row + rows[1])


def _qkv_rows(plan: WorkPlan, op: SelfAttention, rank: int) -> Rows:
    d, shard = plan.config.head_dim, plan.shards[rank]
    v_rows = (shard.kv_heads[0] * d, shard.kv_heads[1] * d)
    return [
        *((op.q, rows) for rows in _rotated_rows(plan, shard.heads)),
        *((op.k, rows) for rows in _rotated_rows(plan, shard.kv_heads)),
        (op.v, v_rows),
    ]


def _rotated_rows(plan: WorkPlan, heads: Range) -> list[Range]:
    """The rows of query or key heads. The rows of each head are in the order in which tasks rotate its elements."""
    d, order = plan.config.head_dim, rotation_order(plan.config)
    if len(order) == 1:
        return [(heads[0] * d, heads[1] * d)]
    return [(head * d + begin, head * d + end) for head in range(*heads) for begin, end in order]


def _gate_up_rows(plan: WorkPlan, op: Mlp, rank: int) -> Rows:
    first = plan.shards[rank].mlp[0]
    slabs = [(first + begin, first + end) for begin, end in plan.mlp[rank].ranges]
    return [(matrix, rows) for rows in slabs for matrix in (op.gate, op.up)]
