"""Row-parallel projections onto the residual stream: the o projection of attention and the down projection of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Segment, Slab, Weight
from distmk.lower.all_reduce import emit_all_reduce, residual_output
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.partition import Partition
from distmk.lower.plan import WorkPlan
from distmk.lower.weights import add_matrix, add_vector, bias_of, bias_rows, rows_of
from distmk.model.nodes import Matrix
from distmk.model.shards import Range
from distmk.tasks import AttentionShape, Linear, PostNorm


@dataclass(frozen=True)
class Projection:
    """y = sum over ranks of x[:, local columns] @ matrix[:, columns of the rank].T + bias; x_residual += post_norm(y).

    name: of its tasks. write: its index among the writes of the residual stream. x: bf16 [MAX_ROWS, columns of a rank]. cols:
    each rank's columns of the matrix. partition: rows of the matrix, by task. post_norm: of the checkpoint, without `.weight`;
    None: y is added as it is. norm_offset: added to its weight. fused_partials: the partials of a single row, which each task
    combines for itself; None: the row is in x. shapes: the attention that leaves them, by rank.
    """

    name: str
    matrix: Matrix
    write: int
    x: Buffer
    cols: tuple[Range, ...]
    partition: Partition
    post_norm: str | None = None
    norm_offset: float = 0.0
    fused_partials: Buffer | None = None
    shapes: tuple[AttentionShape, ...] = ()


def emit_row_parallel(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, projection: Projection) -> None:
    """The tasks of a projection on all ranks, and the all-reduce behind them. Rank 0 adds the bias."""
    hidden = plan.config.hidden_size
    for rank in plan.ranks:
        begin, end = projection.cols[rank]
        weight = add_matrix(
            graph,
            projection.name,
            rank,
            end - begin,
            [rows_of(projection.matrix, (0, hidden))],
            slabs=projection.partition.ranges,
            tiled=plan.options.tiled,
            col_begin=begin,
            scale=projection.matrix.scale,
        )
        bias = None
        if projection.matrix.bias and rank == 0:
            bias = add_vector(graph, rank, [bias_of(projection.matrix, (0, hidden))], scale=projection.matrix.scale)
        _emit_linear(graph, plan, buffers, projection, rank, weight, bias)
    name, write, partition = projection.name, projection.write, projection.partition
    emit_all_reduce(graph, plan, buffers, name, write, partition, add=True, into=_sums_of(buffers, projection))
    if projection.post_norm:
        _emit_post_norm(graph, plan, buffers, projection, projection.post_norm)


def _sums_of(buffers: DecodeBuffers, projection: Projection) -> Buffer | None:
    """Where the sums of a projection go, in front of its post-norm; None: into the residual stream."""
    return buffers.y if projection.post_norm else None


def _emit_linear(
    graph: Graph,
    plan: WorkPlan,
    buffers: DecodeBuffers,
    projection: Projection,
    rank: int,
    weight: Weight,
    bias: Slab | None,
) -> None:
    partials = projection.fused_partials
    shape = projection.shapes[rank] if partials else None
    for worker, (begin, end) in projection.partition.by_worker():
        graph.add(
            Linear(
                rank=rank,
                op=projection.name,
                worker=worker,
                x=projection.x.at(rank, 0, weight.cols),
                slab=Slab(weight, begin, end),
                batch=buffers.batch.at(rank),
                bias=bias_rows(bias, begin, end),
                num_ranks=plan.options.num_ranks,
                # Before its waits are met, the last y may still be read.
                polls=projection.x.lamport and plan.may_poll(rank, worker) and not projection.post_norm,
                fused_partials=partials.at(rank, 0, shape.fused_partial_cols) if partials and shape else None,
                shape=shape,
                **residual_output(
                    plan, buffers, projection.write, rank, (begin, end), into=_sums_of(buffers, projection)
                ),
            )
        )


def _emit_post_norm(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, projection: Projection, tensor: str) -> None:
    """Every worker adds the columns that it would have added the sums to."""
    hidden, y = plan.config.hidden_size, _sums_of(buffers, projection)
    assert y, "the buffers are of a model without post-norms"
    for rank in plan.ranks:
        segments = [Segment(f"{tensor}.weight", 0, hidden)]
        weight = add_vector(graph, rank, segments, offset=projection.norm_offset)
        for worker, (begin, end) in projection.partition.by_worker():
            graph.add(
                PostNorm(
                    rank=rank,
                    op=f"{projection.name}.norm",
                    worker=worker,
                    y=y.at(rank),
                    weight=Slab(weight.weight, begin, end),
                    x=buffers.x.at(rank, begin, end),
                    batch=buffers.batch.at(rank),
                    col_begin=begin,
                    eps=plan.config.rms_norm_eps,
                    **buffers.bf16_output(projection.write, rank, (begin, end)),
                )
            )
