"""Lowering, model -> task graph: a work plan, the buffers it needs, and the tasks of each operator.

In the order of the walk: `options`, `partition`, `worker_roles`, `rotating` and `plan` decide; `buffers` and `weights` declare
memory; `scheduler`, `embed`, `attention`, `mlp` and `head` emit tasks, the middle three by way of `row_parallel`, `all_reduce`
and `hierarchical`. An emitter is a function of the graph that it adds to, the plan, the buffers and the operator.
"""

from __future__ import annotations

from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph
from distmk.lower.attention import emit_attention
from distmk.lower.buffers import DecodeBuffers, declare_buffers
from distmk.lower.embed import emit_embed
from distmk.lower.head import emit_head
from distmk.lower.mlp import emit_mlp
from distmk.lower.options import DecodeOptions
from distmk.lower.plan import WorkPlan, plan_work
from distmk.lower.scheduler import emit_scheduler_step
from distmk.model.operators import Embedding, Mlp, Model, Operator, SelfAttention

__all__ = ["DecodeOptions", "lower"]


@no_collection()
def lower(model: Model, options: DecodeOptions) -> Graph:
    """The task graph of one iteration on all ranks. Raises UsageError if there are more ranks than query heads."""
    plan = plan_work(model.config, options)
    graph = Graph(options.num_ranks, options.num_workers, options.num_schedulers, host_sizes=options.host_sizes)
    buffers = declare_buffers(graph, plan)
    emit_scheduler_step(graph, plan, buffers)
    for op in model.operators:
        emit_operator(graph, plan, buffers, op)
    return graph


def emit_operator(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: Operator) -> None:
    """Add the tasks of an operator on all ranks, and the weights that they read, to `graph`."""
    if isinstance(op, Embedding):
        emit_embed(graph, plan, buffers, op)
    elif isinstance(op, SelfAttention):
        emit_attention(graph, plan, buffers, op)
    elif isinstance(op, Mlp):
        emit_mlp(graph, plan, buffers, op)
    else:
        emit_head(graph, plan, buffers, op)
