"""Self-attention: qkv column-parallel, attention over the KV cache split just in time, o row-parallel."""

from __future__ import annotations

from distmk.graph.graph import Graph
from distmk.graph.regions import Segment, Slab
from distmk.lower.buffers import DecodeBuffers, attention_write, mlp_write
from distmk.lower.options import ATTENTION_LAUNCHES
from distmk.lower.plan import WorkPlan
from distmk.lower.row_parallel import Projection, emit_row_parallel
from distmk.lower.weights import add_matrix, add_vector, bias_of, bias_rows, rotated_rows, rows_of
from distmk.model.nodes import Matrix
from distmk.model.operators import SelfAttention
from distmk.model.shards import Range
from distmk.tasks import Attention, Combine, Linear
from distmk.tasks.attention import attention_type


def emit_attention(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: SelfAttention) -> None:
    """x += post_norm(o(attention(q, k, v of norm(x))))."""
    for rank in plan.ranks:
        _emit_qkv(graph, plan, buffers, op, rank)
        _emit_splits(graph, plan, buffers, op, rank)
        _emit_combine(graph, plan, buffers, op, rank)
    d = plan.config.head_dim
    projection = Projection(
        name=f"{op.name}.o",
        matrix=op.o,
        write=attention_write(op.layer),
        x=buffers.attention_out.at(op.layer),
        cols=tuple((begin * d, end * d) for begin, end in (shard.heads for shard in plan.shards)),
        partition=plan.o,
        post_norm=op.post_norm,
        norm_offset=op.norm_offset,
        fused_partials=buffers.partials[op.layer].fused,
        shapes=tuple(plan.shape_of(op, rank) for rank in plan.ranks),
    )
    emit_row_parallel(graph, plan, buffers, projection)


def _emit_qkv(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: SelfAttention, rank: int) -> None:
    parts, partition = _qkv_rows(plan, op, rank), plan.qkv[rank]
    weight = add_matrix(
        graph,
        f"{op.name}.qkv",
        rank,
        plan.config.hidden_size,
        [rows_of(matrix, rows) for matrix, rows in parts],
        slabs=partition.ranges,
        tiled=plan.options.tiled,
        norm=op.norm,
        norm_offset=op.norm_offset,
    )
    bias = None
    if op.q.bias:
        bias = add_vector(graph, rank, [bias_of(matrix, rows) for matrix, rows in parts])
    for worker, (begin, end) in partition.by_worker():
        graph.add(
            Linear(
                rank=rank,
                op=f"{op.name}.qkv",
                worker=worker,
                x=buffers.x_bf16.at(mlp_write(op.layer - 1)).at(rank),
                slab=Slab(weight, begin, end),
                out=buffers.qkv.at(op.layer).at(rank, begin, end),
                reset=buffers.qkv.reset_at(op.layer, rank, begin, end),
                batch=buffers.batch.at(rank),
                bias=bias_rows(bias, begin, end),
                normalized=op.norm is not None,
                eps=plan.config.rms_norm_eps,
                polls=plan.may_poll(rank, worker),
            )
        )


def _qkv_rows(plan: WorkPlan, op: SelfAttention, rank: int) -> list[tuple[Matrix, Range]]:
    """A rank's rows of the three matrices."""
    d, heads, kv_heads = plan.config.head_dim, plan.shards[rank].heads, plan.shards[rank].kv_heads
    q_rows, k_rows = rotated_rows(plan.config, heads), rotated_rows(plan.config, kv_heads)
    v_rows = (kv_heads[0] * d, kv_heads[1] * d)
    return [*((op.q, rows) for rows in q_rows), *((op.k, rows) for rows in k_rows), (op.v, v_rows)]


def _emit_splits(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: SelfAttention, rank: int) -> None:
    """Partial results of every KV head, run of rows and split of the positions."""
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
            q_norm=_head_norm(graph, plan, rank, op.q_norm, op.norm_offset),
            k_norm=_head_norm(graph, plan, rank, op.k_norm, op.norm_offset),
            fused_partials=partials.fused.at(rank, 0, shape.fused_partial_cols) if partials.fused else None,
            reset=partials.reset(rank, shape.fused_partial_cols),
            eps=plan.config.rms_norm_eps,
            polls=plan.attention_may_poll(rank),
            long_splits=kind is Attention and shape.has_long_splits(options.max_model_len, options.max_seqs),
        )
    )


def _head_norm(graph: Graph, plan: WorkPlan, rank: int, tensor: str | None, offset: float) -> Slab | None:
    if not tensor:
        return None
    segments = [Segment(f"{tensor}.weight", begin, end) for begin, end in rotated_rows(plan.config, (0, 1))]
    return add_vector(graph, rank, segments, offset=offset)


def _emit_combine(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: SelfAttention, rank: int) -> None:
    """The splits of each slice combined into attention's output, but for a single row that the o projection combines."""
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
                reset=buffers.attention_out.reset_at(op.layer, rank, *cols),
                batch=buffers.batch.at(rank),
                polls=plan.combine_may_poll(rank),
                skips_fused=plan.fuses_combine,
            )
        )
