"""Self-attention: qkv column-parallel, attention split just in time, o row-parallel."""

from __future__ import annotations

from distmk.graph.regions import Buffer, Segment, Slab
from distmk.lower.context import Lowering
from distmk.lower.options import ATTENTION_LAUNCHES
from distmk.model.operators import SelfAttention
from distmk.model.shards import deal
from distmk.tasks import Attention, AttentionShape, Combine, Linear

MERGED_AT_ONCE = 4  # rows times slices that are worth a task of their own


def lower_attention(c: Lowering, op: SelfAttention) -> None:
    layer, d = c.buffers.next_cache(), c.config.head_dim
    c.buffers.qkv.turn()
    c.buffers.attn.turn()
    if c.buffers.fused_partials:
        c.buffers.fused_partials.turn()
    for rank in c.ranks():
        (q0, q1), (k0, k1) = c.shards[rank].heads, c.shards[rank].kv_heads
        parts = [(op.q, q0 * d, q1 * d), (op.k, k0 * d, k1 * d), (op.v, k0 * d, k1 * d)]
        _qkv(c, op, rank, parts)
        _attend(c, op, rank, *layer)
    c.row_parallel(
        f"{op.name}.o",
        op.o,
        c.buffers.attn,
        c.buffers.attn_slots,
        c.o_parts(),
        op.o_bias,
        c.buffers.fused_partials,
        c.num_reserved,
    )


def _qkv(c: Lowering, op: SelfAttention, rank: int, parts: list[tuple[str, int, int]]) -> None:
    hidden, b = c.config.hidden_size, c.buffers
    segments = [Segment(f"{tensor}.weight", begin, end) for tensor, begin, end in parts]
    cuts, num_polling = c.qkv_cuts(rank, c.num_reserved, c.num_reduced), c.num_polling[rank]
    weight = c.matrix(f"{op.name}.qkv", rank, hidden, segments, cuts, norm=op.norm)
    bias = c.vector(rank, *((f"{t}.bias", s, e) for t, s, e in parts)) if op.qkv_bias else None
    for worker, (begin, end) in enumerate(cuts, c.num_reserved):
        c.graph.add(
            Linear(
                rank=rank,
                op=f"{op.name}.qkv",
                worker=worker,
                x=b.x_bf16.at(rank),
                slab=Slab(weight, begin, end),
                out=b.qkv.at(rank, begin, end),
                reset=b.qkv.reset_at(rank, begin, end),
                batch=b.batch.at(rank),
                bias=bias and Slab(bias.weight, begin, end),
                normalized=True,
                eps=c.config.rms_norm_eps,
                polls=worker < num_polling,
            )
        )


def _attend(c: Lowering, op: SelfAttention, rank: int, k_cache: Buffer, v_cache: Buffer) -> None:
    shape, b, d = c.shapes[rank], c.buffers, c.config.head_dim
    launch = ATTENTION_LAUNCHES[c.options.attention_launch]
    c.graph.add(
        Attention(
            rank=rank,
            op=f"{op.name}.attention",
            launch=launch,
            shape=shape,
            qkv=b.qkv.at(rank, 0, shape.qkv_cols),
            k_cache=k_cache.at(rank, 0, shape.cache_cols),
            v_cache=v_cache.at(rank, 0, shape.cache_cols),
            page_table=b.page_table.at(rank),
            partials=b.partials.at(rank, 0, shape.num_partials),
            batch=b.batch.at(rank),
            rope=c.rope[rank],
            q_norm=c.vector(rank, (f"{op.q_norm}.weight", 0, d)) if op.q_norm else None,
            k_norm=c.vector(rank, (f"{op.k_norm}.weight", 0, d)) if op.k_norm else None,
            fused_partials=b.fused_partials.at(rank, 0, shape.fused_partial_cols) if b.fused_partials else None,
            reset=b.fused_partials.reset_at(rank, 0, shape.fused_partial_cols) if b.fused_partials else None,
            eps=c.config.rms_norm_eps,
            polls=c.is_spread and b.qkv.buffer.lamport and c.num_polling[rank] == c.options.num_workers,
            long_splits=shape.has_long_splits(c.options.max_model_len, c.options.max_seqs),
        )
    )
    merges = _merges(c, shape)
    first = _first_with_merges(c, len(merges))
    for worker, (begin, end) in enumerate(merges, first):
        c.graph.add(
            Combine(
                rank=rank,
                op=f"{op.name}.combine",
                worker=worker,
                shape=shape,
                slices=(begin, end),
                partials=b.partials.at(rank, begin * shape.partial_cols, end * shape.partial_cols),
                out=b.attn.at(rank, shape.slice_begin(begin), shape.slice_begin(end)),
                reset=b.attn.reset_at(rank, shape.slice_begin(begin), shape.slice_begin(end)),
                batch=b.batch.at(rank),
                polls=first + len(merges) <= c.num_polling[rank],
                skips_fused=bool(b.fused_partials),
            )
        )


def _first_with_merges(c: Lowering, num_merges: int) -> int:
    """The first of the workers that have merges, a task more before they turn to o: those without a part of o, or of those with
    a single row's attention, who have less of qkv, the last; else who has nothing of its attention.
    """
    if not c.buffers.fused_partials or num_merges <= c.num_reserved:
        return 0
    return (c.num_reduced if num_merges <= c.num_reduced else c.options.num_workers) - num_merges


def _merges(c: Lowering, shape: AttentionShape) -> list[tuple[int, int]]:
    """Slices of heads, dealt to tasks: the more rows there may be, the fewer for a task, so that its warps are enough."""
    total = shape.num_q * shape.slices
    num_tasks = min(c.options.num_workers, -(-total // max(1, MERGED_AT_ONCE // c.options.max_seqs)))
    return [deal(total, num_tasks, task) for task in range(num_tasks)]
