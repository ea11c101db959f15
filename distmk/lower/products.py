"""The matrix products of a model: the checkpoint rows of each rank's matrix, and how tasks divide these rows.

The programs of all buckets multiply the same matrices, packed for one task per slab (`Weight.tiling`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distmk.abi import Epilogue
from distmk.errors import UsageError
from distmk.formats import find_format
from distmk.graph.graph import Graph
from distmk.graph.partition import Partition
from distmk.graph.regions import Segment, Slab, Tiling, Weight, WeightKind
from distmk.lower.packed import input_formats, is_packed
from distmk.lower.plan import WorkPlan
from distmk.lower.product import Part, Product
from distmk.model.nn import ACTIVATIONS
from distmk.model.nodes import Matrix
from distmk.model.operators import Embedding, Head, Mlp, Operator, SelfAttention
from distmk.model.rope import rotation_order
from distmk.model.shards import Range

Rows = list[tuple[Matrix, Range]]


def embedding_tables(graph: Graph, plan: WorkPlan, op: Embedding) -> tuple[Slab, ...]:
    """Each rank's rows of the embedding, times its scale if the plan folds factors. Tables have no tiles."""
    tables = (
        graph.weight(
            op.table,
            rank,
            plan.config.hidden_size,
            [Segment(f"{op.table}.weight", *shard.vocab)],
            WeightKind.MATRIX,
            scale=op.scale if plan.options.folds_factors else 1.0,
            format=find_format(op.format),
        )
        for rank, shard in enumerate(plan.shards)
    )
    return tuple(Slab(table, 0, table.rows) for table in tables)


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
    """The logits of norm(x), vocabulary-parallel. A tied head without folded factors is the embedding's table."""
    name = "head" if plan.options.folds_factors else op.table
    rows = [[Segment(f"{op.table}.weight", *shard.vocab)] for shard in plan.shards]
    parts = tuple(
        (Part(_matrix(graph, plan, name, rank, rows[rank], plan.head[rank], op.format, op, scale=op.scale), 0),)
        for rank in plan.ranks
    )
    return Product(
        "head",
        parts,
        (None,) * len(parts),
        plan.head,
        applies_rms=True,
        scale=_scale_left(plan, op.scale, op.format),
        norms=_norms_left(graph, plan, op, parts),
    )


def post_norms(graph: Graph, plan: WorkPlan, op: SelfAttention | Mlp) -> tuple[Slab | None, ...]:
    """The weight of the norm after an operator's projection, on each rank; None without such a norm."""
    return _norms(graph, plan, op.post_norm, op.norm_offset)


def input_norms(graph: Graph, plan: WorkPlan, op: Operator | None) -> tuple[Slab | None, ...]:
    """The weight of the norm before an operator, on each rank; None without a norm, or if it is folded into all matrices."""
    is_folded = plan.options.folds_factors and not any(map(is_packed, input_formats(op)))
    if is_folded or op is None or isinstance(op, Embedding):
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
    parts, biases, paired = [], [], epilogue is not Epilogue.STORE
    for rank in plan.ranks:
        found: list[Part] = []
        for _, group in itertools.groupby(rows[rank], lambda each: _alike(each[0], paired)):
            matrices = list(group)
            segments = [_segment(matrix, "weight", part) for matrix, part in matrices]
            format_name = matrices[0][0].format
            part_name = f"{name}.{len(found)}" if found else name
            first = found[-1].rows[1] if found else 0
            weight = _matrix(
                graph,
                plan,
                part_name,
                rank,
                segments,
                partitions[rank],
                format_name,
                op,
                paired=paired,
                first_row=first,
            )
            found.append(Part(weight, first, _order(graph, rank, weight)))
        parts.append(tuple(found))
        of_rows = [_segment(matrix, "bias", part) for matrix, part in rows[rank]]
        biases.append(_vector(graph, rank, of_rows) if bias else None)
    norms = _norms_left(graph, plan, op, tuple(parts))
    return Product(name, tuple(parts), tuple(biases), partitions, epilogue, op.norm is not None, norms=norms)


def _row_parallel(
    graph: Graph, plan: WorkPlan, name: str, matrix: Matrix, cols: list[Range], partition: Partition
) -> Product:
    """cols: by rank, its columns of the matrix. Rank 0 alone adds the bias."""
    hidden, num_cols = (0, plan.config.hidden_size), cols[-1][1]
    parts, biases = [], []
    for rank in plan.ranks:
        segments = [_segment(matrix, "weight", hidden)]
        weight = _matrix(
            graph,
            plan,
            name,
            rank,
            segments,
            partition,
            matrix.format,
            cols=cols[rank],
            num_cols=num_cols,
            scale=matrix.scale,
        )
        if weight.format.is_ordered and weight.cols < num_cols:
            raise UsageError(
                f"{matrix.tensor} stores its columns by activation (desc_act), which {len(cols)} ranks cannot divide; "
                "use one rank, or quantization bf16"
            )
        parts.append((Part(weight, 0, _order(graph, rank, weight)),))
        of_rows = [_segment(matrix, "bias", hidden)]
        has_bias = matrix.bias and rank == 0
        biases.append(_vector(graph, rank, of_rows, scale=matrix.scale) if has_bias else None)
    partitions = (partition,) * len(parts)
    scale = _scale_left(plan, matrix.scale, matrix.format)
    return Product(name, tuple(parts), tuple(biases), partitions, scale=scale)


def _alike(matrix: Matrix, paired: bool) -> tuple[str, str]:
    """Equal for matrices whose rows may be in one part. Rows of gate and up, which are paired, have the same order."""
    return matrix.format, matrix.tensor if find_format(matrix.format).is_ordered and not paired else ""


def _order(graph: Graph, rank: int, weight: Weight) -> Slab | None:
    """The order of the columns of a matrix that has one."""
    if not weight.format.is_ordered:
        return None
    tensor = weight.segments[0].tensor
    order = graph.weight(f"{tensor}.order", rank, 1, [Segment(tensor, 0, weight.cols)], WeightKind.ORDER)
    return Slab(order, 0, order.rows)


def _scale_left(plan: WorkPlan, scale: float, format_name: str) -> float:
    """The scale of a matrix, if it is not folded into the matrix; else 1."""
    return 1.0 if plan.options.folds_factors and find_format(format_name).folds_factors else scale


def _norms_left(
    graph: Graph, plan: WorkPlan, op: SelfAttention | Mlp | Head, parts: tuple[tuple[Part, ...], ...]
) -> tuple[Slab | None, ...]:
    """`Product.norms`; empty if no task multiplies by them."""
    if not plan.options.folds_factors or all(part.weight.format.folds_factors for of_rank in parts for part in of_rank):
        return ()
    return _norms(graph, plan, op.norm, op.norm_offset)


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
    format_name: str,
    op: SelfAttention | Mlp | Head | None = None,
    *,
    cols: Range | None = None,
    num_cols: int | None = None,
    paired: bool = False,
    scale: float = 1.0,
    first_row: int = 0,
) -> Weight:
    """A matrix of one rank, or its rows from `first_row` on that have one format.

    cols: columns of the checkpoint's matrix of `num_cols` columns; None: all.

    If the plan and the format fold factors, the matrix is multiplied by `scale`, and its columns by the weight of the norm
    of `op`.
    """
    begin, end = cols or (0, plan.config.hidden_size)
    found = find_format(format_name)
    first, last = found.whole_groups(begin, end, num_cols or end)
    folds = plan.options.folds_factors and found.folds_factors
    norm = op.norm if op and folds else None
    last_row = first_row + sum(segment.rows for segment in segments)
    slabs = tuple(
        (max(from_row - first_row, 0), min(to_row, last_row) - first_row)
        for from_row, to_row in partition.ranges
        if from_row < last_row and to_row > first_row
    )
    return graph.weight(
        name,
        rank,
        end - begin,
        segments,
        WeightKind.MATRIX,
        begin,
        tiling=Tiling(slabs, paired) if plan.options.tiled else None,
        col_scale=f"{norm}.weight" if norm else None,
        offset=op.norm_offset if op and folds else 0.0,
        scale=scale if folds else 1.0,
        format=found,
        lead=begin - first,
        tail=last - end,
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
