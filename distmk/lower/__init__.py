"""Lowering: model -> task graphs, one for each row bucket.

It makes a work plan, the buffers, and the tasks of each operator.

The modules, in the order of a walk: `options`, `worker_roles`, `rotating` and `plan` decide. `products` declares the
matrices, which all buckets share (`product`), and `buffers` the buffers that every program has. A bucket of up to
MAX_ROWS rows has one task for each worker's slab of a matrix: `slab_buffers` and the emitters `embed`, `attention`,
`mlp` and `head`, which use `column_parallel`, `row_parallel`, `all_reduce` and `hierarchical`. A bucket of more rows
has jobs: `job_buffers` and `jobs`.
"""

from __future__ import annotations

from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph, Memory
from distmk.lower.attention import emit_attention
from distmk.lower.embed import emit_embed
from distmk.lower.head import emit_head
from distmk.lower.jobs import emit_jobs
from distmk.lower.mlp import emit_mlp
from distmk.lower.options import Bucket, DecodeOptions
from distmk.lower.plan import WorkPlan, plan_work
from distmk.lower.scheduler import emit_scheduler_step
from distmk.lower.slab_buffers import SlabBuffers, declare_slab_buffers
from distmk.model.operators import Embedding, Mlp, Model, Operator, SelfAttention

__all__ = ["DecodeOptions", "emit_operator", "lower_programs"]


def lower_programs(model: Model, options: DecodeOptions) -> tuple[Graph, ...]:
    """The task graphs of the programs of a launch (`DecodeOptions.row_buckets`), in the order of the programs' numbers.

    Raises UsageError if there are more ranks than query heads.
    """
    plan, memory = plan_work(model, options), Memory()
    return tuple(lower(model, plan, bucket, memory) for bucket in options.buckets)


@no_collection()
def lower(model: Model, plan: WorkPlan, bucket: Bucket, memory: Memory) -> Graph:
    """The task graph of one iteration of `bucket` on all ranks. memory: shared by all programs of the launch."""
    options = plan.options
    graph = Graph(
        options.num_ranks, options.num_workers, options.num_schedulers, host_sizes=options.host_sizes, memory=memory
    )
    if bucket.has_jobs:
        emit_jobs(graph, model, plan, bucket)
        return graph
    buffers = declare_slab_buffers(graph, plan, bucket)
    emit_scheduler_step(graph, plan, buffers)
    for op in model.operators:
        emit_operator(graph, plan, buffers, op)
    return graph


def emit_operator(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: Operator) -> None:
    """Add the tasks of an operator on all ranks to `graph`, one for each slab, and the weights that they read."""
    if isinstance(op, Embedding):
        emit_embed(graph, plan, buffers, op)
    elif isinstance(op, SelfAttention):
        emit_attention(graph, plan, buffers, op)
    elif isinstance(op, Mlp):
        emit_mlp(graph, plan, buffers, op)
    else:
        emit_head(graph, plan, buffers, op)
