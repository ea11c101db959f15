"""Row-parallel projections onto the residual stream: the o projection of attention and the down projection of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Segment, Slab, Weight
from distmk.lower.all_reduce import emit_all_reduce, residual_output
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.partition import Partition
from distmk.lower.plan import WorkPlan
from distmk.lower.weights import add_matrix, add_vector, bias_rows
from distmk.model.shards import Range
from distmk.tasks import AttentionShape, Linear


@dataclass(frozen=True)
class Projection:
    """x_residual += sum over ranks of x[:, local columns] @ matrix[:, columns of the rank].T + bias.

    name: of its tasks. tensor: of the checkpoint, without `.weight` or `.bias`. write: its index among the writes of the
    residual stream. x: bf16 [MAX_ROWS, columns of a rank]. cols: each rank's columns of the matrix. partition: rows of the
    matrix, by task. fused_partials: the partials of a single row, which each task combines for itself; None: the row is in x.
    shapes: the attention that leaves them, by rank.
    """

    name: str
    tensor: str
    write: int
    x: Buffer
    cols: tuple[Range, ...]
    partition: Partition
    has_bias: bool
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
            [Segment(f"{projection.tensor}.weight", 0, hidden)],
            slabs=projection.partition.ranges,
            tiled=plan.options.tiled,
            col_begin=begin,
        )
        bias = None
        if projection.has_bias and rank == 0:
            bias = add_vector(graph, rank, [Segment(f"{projection.tensor}.bias", 0, hidden)])
        _emit_linear(graph, plan, buffers, projection, rank, weight, bias)
    emit_all_reduce(graph, plan, buffers, projection.name, projection.write, projection.partition, add=True)


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
                polls=projection.x.lamport and plan.may_poll(rank, worker),
                fused_partials=partials.at(rank, 0, shape.fused_partial_cols) if partials and shape else None,
                shape=shape,
                **residual_output(plan, buffers, projection.write, rank, (begin, end)),
            )
        )
