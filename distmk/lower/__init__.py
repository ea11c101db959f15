"""Lowering, model -> task graph: a work plan, the buffers it needs, and the tasks of each operator.

In the order of the walk: `options`, `partition`, `worker_roles`, `rotating` and `plan` decide; `buffers` and `weights` declare
memory; `scheduler`, `embed`, `attention`, `mlp` and `head` emit tasks, the middle three by way of `row_parallel`, `all_reduce`
and `hierarchical`. An emitter is a function of the graph that it adds to, the plan, the buffers and the operator. `wide` does the
same for wide iterations, with memory of its own that `wide_buffers` declares.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import MAX_ROWS
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
from distmk.lower.wide import lower_wide
from distmk.model.operators import Embedding, Mlp, Model, Operator, SelfAttention

__all__ = ["DecodeOptions", "Lowered", "lower", "lower_narrow", "lower_programs", "lower_wide"]


@dataclass(frozen=True)
class Lowered:
    """The task graph of a narrow iteration, with the work plan and the buffers that it was made of."""

    plan: WorkPlan
    graph: Graph
    buffers: DecodeBuffers


def lower(model: Model, options: DecodeOptions) -> Graph:
    """The task graph of one narrow iteration on all ranks. Raises UsageError if there are more ranks than query heads."""
    return lower_narrow(model, options).graph


def lower_programs(model: Model, options: DecodeOptions) -> tuple[Graph, ...]:
    """The task graphs of the programs of a launch (`DecodeOptions.row_buckets`), in the order of their numbers."""
    lowered = lower_narrow(model, options)
    graphs, first = [], None
    for program, max_rows in enumerate(options.row_buckets):
        if max_rows <= MAX_ROWS:
            graphs.append(lowered.graph)
            continue
        wide = lower_wide(model, lowered.plan, lowered.graph, lowered.buffers, program, first)
        first = first or wide
        graphs.append(wide[0])
    return tuple(graphs)


@no_collection()
def lower_narrow(model: Model, options: DecodeOptions) -> Lowered:
    """The same, and what `lower_wide` needs beside it."""
    plan = plan_work(model, options)
    graph = Graph(options.num_ranks, options.num_workers, options.num_schedulers, host_sizes=options.host_sizes)
    buffers = declare_buffers(graph, plan)
    if options.row_buckets[0] == MAX_ROWS:
        emit_scheduler_step(graph, plan, buffers, program=0)
    for op in model.operators:
        emit_operator(graph, plan, buffers, op)
    return Lowered(plan, graph, buffers)


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
