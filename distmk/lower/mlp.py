"""The MLP: gate and up column-parallel in one task, down row-parallel."""

from __future__ import annotations

from distmk.graph.graph import Graph
from distmk.lower.column_parallel import emit_columns
from distmk.lower.plan import WorkPlan
from distmk.lower.products import down_product, gate_up_product
from distmk.lower.row_parallel import Projection, emit_row_parallel
from distmk.lower.slab_buffers import SlabBuffers, attention_write, mlp_write
from distmk.model.operators import Mlp


def emit_mlp(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: Mlp) -> None:
    """x += post_norm(down(activation(gate(norm(x))) * up(norm(x))))."""
    gate_up = gate_up_product(graph, plan, op)
    for rank in plan.ranks:
        emit_columns(graph, plan, buffers, gate_up, rank, attention_write(op.layer), buffers.mlp_hidden, op.layer)
    down = down_product(graph, plan, op)
    hidden = buffers.mlp_hidden.at(op.layer)
    emit_row_parallel(graph, plan, buffers, Projection(down, op, mlp_write(op.layer), hidden))
