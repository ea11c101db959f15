"""The MLP: gate and up column-parallel in one task, down row-parallel."""

from __future__ import annotations

from distmk.abi import Epilogue
from distmk.graph.graph import Graph
from distmk.graph.regions import Slab
from distmk.lower.buffers import DecodeBuffers, attention_write, mlp_write
from distmk.lower.plan import WorkPlan
from distmk.lower.row_parallel import Projection, emit_row_parallel
from distmk.lower.weights import add_matrix, add_vector, bias_of, bias_rows, rows_of
from distmk.model.nodes import ActivationKind
from distmk.model.operators import Mlp
from distmk.tasks import Linear

EPILOGUES: dict[ActivationKind, Epilogue] = {"silu": Epilogue.SWIGLU, "gelu_tanh": Epilogue.GEGLU}


def emit_mlp(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: Mlp) -> None:
    """x += post_norm(down(activation(gate(norm(x))) * up(norm(x))))."""
    for rank in plan.ranks:
        _emit_gate_up(graph, plan, buffers, op, rank)
    projection = Projection(
        name=f"{op.name}.down",
        matrix=op.down,
        write=mlp_write(op.layer),
        x=buffers.mlp_hidden.at(op.layer),
        cols=tuple(shard.mlp for shard in plan.shards),
        partition=plan.down,
        post_norm=op.post_norm,
        norm_offset=op.norm_offset,
    )
    emit_row_parallel(graph, plan, buffers, projection)


def _emit_gate_up(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: Mlp, rank: int) -> None:
    first, _ = plan.shards[rank].mlp
    # A task's gate rows and then its up rows are one slab, and so one stream of bytes.
    rows = [(first + begin, first + end) for begin, end in plan.mlp[rank].ranges]
    weight = add_matrix(
        graph,
        f"{op.name}.gate_up",
        rank,
        plan.config.hidden_size,
        [rows_of(matrix, pair) for pair in rows for matrix in (op.gate, op.up)],
        slabs=[(2 * begin, 2 * end) for begin, end in plan.mlp[rank].ranges],
        tiled=plan.options.tiled,
        paired=True,
        norm=op.norm,
        norm_offset=op.norm_offset,
    )
    bias = None
    if op.gate.bias:
        bias = add_vector(graph, rank, [bias_of(matrix, pair) for pair in rows for matrix in (op.gate, op.up)])
    for worker, (begin, end) in plan.mlp[rank].by_worker():
        may_poll = plan.may_poll(rank, worker)
        graph.add(
            Linear(
                rank=rank,
                op=f"{op.name}.gate_up",
                worker=worker,
                x=buffers.x_bf16.at(attention_write(op.layer)).at(rank),
                slab=Slab(weight, 2 * begin, 2 * end),
                out=buffers.mlp_hidden.at(op.layer).at(rank, begin, end),
                reset=buffers.mlp_hidden.reset_at(op.layer, rank, begin, end),
                batch=buffers.batch.at(rank),
                bias=bias_rows(bias, 2 * begin, 2 * end),
                epilogue=EPILOGUES[op.activation],
                normalized=op.norm is not None,
                eps=plan.config.rms_norm_eps,
                polls=may_poll,
                # Elements of o come well before its events, most of all behind attention. A reserved worker runs none of o.
                deep_lookahead=may_poll and worker >= plan.roles.num_reserved,
            )
        )
