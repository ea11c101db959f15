"""Column-parallel products of the residual stream: qkv of attention, and gate and up of the MLP."""

from __future__ import annotations

from distmk.abi import GATED
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Slab
from distmk.lower.plan import WorkPlan
from distmk.lower.products import Product
from distmk.lower.rotating import RotatingBuffers
from distmk.lower.slab_buffers import SlabBuffers
from distmk.tasks import Linear


def emit_columns(
    graph: Graph,
    plan: WorkPlan,
    buffers: SlabBuffers,
    product: Product,
    rank: int,
    x: Buffer,
    out: RotatingBuffers,
    layer: int,
) -> None:
    """The tasks of a product on one rank, a slab each, of bf16 columns `x` into those of `out`."""
    is_gated = product.epilogue in GATED
    for worker, (begin, end) in product.partitions[rank].by_worker():
        cols = (begin // 2, end // 2) if is_gated else (begin, end)
        may_poll = plan.may_poll(rank, worker)
        graph.add(
            Linear(
                rank=rank,
                op=product.name,
                worker=worker,
                x=x.at(rank),
                slab=Slab(product.weights[rank], begin, end),
                out=out.at(layer).at(rank, *cols),
                reset=out.reset_at(layer, rank, *cols),
                batch=buffers.batch.at(rank),
                bias=product.bias_rows(rank, begin, end),
                epilogue=product.epilogue,
                normalized=product.normalized,
                eps=plan.config.rms_norm_eps,
                polls=may_poll,
                # Elements of o come well before its events, most of all behind attention. A reserved worker runs none of o.
                deep_lookahead=is_gated and may_poll and worker >= plan.roles.num_reserved,
            )
        )
