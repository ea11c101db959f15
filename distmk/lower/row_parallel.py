"""Row-parallel projections onto the residual stream: the o projection of attention and the down projection of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Slab
from distmk.lower.all_reduce import emit_all_reduce, residual_output
from distmk.lower.plan import WorkPlan
from distmk.lower.product import Product, slab_task
from distmk.lower.products import post_norms
from distmk.lower.slab_buffers import SlabBuffers
from distmk.model.operators import Mlp, SelfAttention
from distmk.tasks import AttentionShape, PostNorm


@dataclass(frozen=True)
class Projection:
    """y = sum over ranks of x @ matrix.T + bias; x_residual += post_norm(y).

    op: the operator that the projection belongs to.
    write: its index among the writes of the residual stream.
    x: bf16 [MAX_ROWS, columns of a rank].
    fused_partials: the partials of a single row, which each task combines for itself; None: the row is in x.
    shapes: by rank, the attention that writes the fused partials.
    """

    product: Product
    op: SelfAttention | Mlp
    write: int
    x: Buffer
    fused_partials: Buffer | None = None
    shapes: tuple[AttentionShape, ...] = ()


def emit_row_parallel(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, projection: Projection) -> None:
    """The tasks of a projection on all ranks, and the all-reduce that follows."""
    for rank in plan.ranks:
        _emit_linear(graph, plan, buffers, projection, rank)
    product = projection.product
    into = _sums_of(buffers, projection)
    emit_all_reduce(
        graph, plan, buffers, product.name, projection.write, product.partitions[0], accumulates=True, into=into
    )
    if projection.op.post_norm:
        _emit_post_norm(graph, plan, buffers, projection)


def _sums_of(buffers: SlabBuffers, projection: Projection) -> Buffer | None:
    """The buffer for the sums of a projection that has a post-norm; None: the sums go into the residual stream."""
    return buffers.post_norm_input if projection.op.post_norm else None


def _emit_linear(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, projection: Projection, rank: int) -> None:
    partials, product = projection.fused_partials, projection.product
    shape = projection.shapes[rank] if partials else None
    num_cols, into = product.parts[rank][0].weight.cols, _sums_of(buffers, projection)
    for worker, rows in product.partitions[rank].by_worker():
        graph.add(
            slab_task(
                plan,
                product,
                rank,
                rows,
                worker=worker,
                x=projection.x.at(rank, 0, num_cols),
                batch=buffers.batch.at(rank),
                num_ranks=plan.options.num_ranks,
                # Before its waits are met, another task may still read the previous y.
                polls_x=projection.x.lamport and plan.may_poll(rank, worker) and not into,
                fused_partials=partials.at(rank, 0, shape.fused_partial_cols) if partials and shape else None,
                shape=shape,
                **residual_output(plan, buffers, projection.write, rank, worker, rows, into=into),
            )
        )


def _emit_post_norm(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, projection: Projection) -> None:
    """Every worker normalizes and adds the columns that it would otherwise have added the sums to."""
    y, product = _sums_of(buffers, projection), projection.product
    assert y, "the buffers are of a model without post-norms"
    for rank, weight in enumerate(post_norms(graph, plan, projection.op)):
        assert weight, "the operator has no post-norm"
        for worker, (begin, end) in product.partitions[rank].by_worker():
            graph.add(
                PostNorm(
                    rank=rank,
                    op=f"{product.name}.norm",
                    worker=worker,
                    y=y.at(rank),
                    weight=Slab(weight.weight, begin, end),
                    x=buffers.x.at(rank, begin, end),
                    batch=buffers.batch.at(rank),
                    col_begin=begin,
                    eps=plan.config.rms_norm_eps,
                    **buffers.bf16_output(projection.write, rank, worker, (begin, end)),
                )
            )
