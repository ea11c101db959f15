"""Self-attention: qkv column-parallel, attention over the KV cache split just in time, o row-parallel."""

from __future__ import annotations

from distmk.graph.graph import Graph
from distmk.lower.column_parallel import emit_columns
from distmk.lower.options import ATTENTION_LAUNCHES
from distmk.lower.plan import WorkPlan
from distmk.lower.products import head_norm, o_product, qkv_product
from distmk.lower.row_parallel import Projection, emit_row_parallel
from distmk.lower.slab_buffers import SlabBuffers, attention_write, mlp_write
from distmk.model.operators import SelfAttention
from distmk.tasks import Attention, Combine
from distmk.tasks.attention import attention_type


def emit_attention(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: SelfAttention) -> None:
    """x += post_norm(o(attention(q, k, v of norm(x))))."""
    qkv = qkv_product(graph, plan, op)
    for rank in plan.ranks:
        emit_columns(graph, plan, buffers, qkv, rank, mlp_write(op.layer - 1), buffers.qkv, op.layer)
        _emit_splits(graph, plan, buffers, op, rank)
        _emit_combine(graph, plan, buffers, op, rank)
    projection = Projection(
        product=o_product(graph, plan, op),
        op=op,
        write=attention_write(op.layer),
        x=buffers.attention_out.at(op.layer),
        fused_partials=buffers.partials[op.layer].fused,
        shapes=tuple(plan.shape_of(op, rank) for rank in plan.ranks),
    )
    emit_row_parallel(graph, plan, buffers, projection)


def _emit_splits(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: SelfAttention, rank: int) -> None:
    """Tasks that compute the partial results of every KV head, run of rows and split of the positions."""
    shape, options = plan.shape_of(op, rank), plan.options
    k_cache, v_cache = buffers.caches[op.layer]
    partials, kind = buffers.partials[op.layer], attention_type(shape)
    graph.add(
        kind(
            rank=rank,
            op=f"{op.name}.attention",
            launch=ATTENTION_LAUNCHES[options.attention_launch],
            shape=shape,
            qkv=buffers.qkv.at(op.layer).at(rank, 0, shape.qkv_cols),
            k_cache=k_cache.at(rank, 0, shape.cache_cols),
            v_cache=v_cache.at(rank, 0, shape.cache_cols),
            page_table=buffers.page_table.at(rank),
            partials=partials.of_splits.at(rank, 0, shape.num_partials),
            batch=buffers.batch.at(rank),
            rope=buffers.ropes[op.rope][rank],
            q_norm=head_norm(graph, plan, rank, op.q_norm, op.norm_offset),
            k_norm=head_norm(graph, plan, rank, op.k_norm, op.norm_offset),
            fused_partials=partials.fused.at(rank, 0, shape.fused_partial_cols) if partials.fused else None,
            lamport_reset=partials.reset(rank, shape.fused_partial_cols),
            eps=plan.config.rms_norm_eps,
            polls_qkv=plan.attention_may_poll(rank),
            long_splits=kind is Attention and shape.has_long_splits(options.max_model_len, options.max_seqs),
        )
    )


def _emit_combine(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: SelfAttention, rank: int) -> None:
    """Tasks that combine the splits of each slice into attention's output, unless the o projection combines a single row."""
    shape, partials = plan.shape_of(op, rank), buffers.partials[op.layer].of_splits
    for worker, (begin, end) in plan.combine[rank].by_worker():
        cols = shape.slice_begin(begin), shape.slice_begin(end)
        graph.add(
            Combine(
                rank=rank,
                op=f"{op.name}.combine",
                worker=worker,
                shape=shape,
                slices=(begin, end),
                partials=partials.at(rank, begin * shape.partial_cols, end * shape.partial_cols),
                out=buffers.attention_out.at(op.layer).at(rank, *cols),
                lamport_reset=buffers.attention_out.reset_at(op.layer, rank, *cols),
                batch=buffers.batch.at(rank),
                polls_partials=plan.combine_may_poll(rank),
                skips_fused=plan.fuses_combine,
            )
        )
