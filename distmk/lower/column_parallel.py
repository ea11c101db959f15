"""Column-parallel products of the residual stream: qkv of attention, and gate and up of the MLP."""

from __future__ import annotations

from distmk.abi import GATED
from distmk.graph.graph import Graph
from distmk.lower.plan import WorkPlan
from distmk.lower.product import Product, slab_task
from distmk.lower.rotating import RotatingBuffers
from distmk.lower.slab_buffers import SlabBuffers


def emit_columns(
    graph: Graph,
    plan: WorkPlan,
    buffers: SlabBuffers,
    product: Product,
    rank: int,
    write: int,
    out: RotatingBuffers,
    layer: int,
) -> None:
    """The tasks of a product on one rank, one for each slab, or for each of a slab's parts that differ in format.

    They multiply what write `write` of the residual stream left, into `out`.
    """
    is_gated = product.epilogue in GATED
    slabs = product.partitions[rank].by_worker()
    for worker, (begin, end) in ((worker, run) for worker, rows in slabs for run in product.runs(rank, rows)):
        cols = (begin // 2, end // 2) if is_gated else (begin, end)
        may_poll = plan.may_poll(rank, worker)
        graph.add(
            slab_task(
                plan,
                product,
                rank,
                (begin, end),
                worker=worker,
                x=buffers.x_bf16.at(write).at(rank),
                x_squares=buffers.x_squares(plan, write, rank),
                out=out.at(layer).at(rank, *cols),
                lamport_reset=out.reset_at(layer, rank, *cols),
                batch=buffers.batch.at(rank),
                epilogue=product.epilogue,
                eps=plan.config.rms_norm_eps,
                polls_x=may_poll,
                # Elements of o arrive well before its events, above all after attention. Reserved workers run no o tasks.
                deep_lookahead=is_gated and may_poll and worker >= plan.roles.num_reserved,
            )
        )
