"""The buffers of a decode program: what lives between tasks, between iterations and between ranks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from distmk.abi import MAX_ROWS, Batch, BatcherState, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer
from distmk.lower.rotating import RotatingBuffers
from distmk.model.config import ModelConfig
from distmk.model.shards import Shard
from distmk.tasks import AttentionShape
from distmk.tasks.scheduling import CANDIDATES_BYTES


@dataclass
class DecodeBuffers:
    """Activations are [MAX_ROWS, columns], bf16 where they are multiplied, else float32; sizes are the largest any rank needs."""

    batch: Buffer  # the row table, put by rank 0
    page_table: Buffer
    state: Buffer  # rank 0's batcher
    x: Buffer  # residual stream
    x_bf16: RotatingBuffers  # the same, bf16
    qkv: RotatingBuffers
    partials: Buffer  # attention splits
    attn: RotatingBuffers
    fused_partials: RotatingBuffers | None  # attention splits of a lone row, where those who multiply it merge them
    hidden: RotatingBuffers  # inside the MLP
    attn_slots: Buffer  # blocks that ranks push for the all-reduce behind attention
    mlp_slots: tuple[Buffer, Buffer]  # and behind the MLP, by turns: a worker without a part of o may push early
    candidates: Buffer
    sampled: Buffer
    logits: Buffer | None
    caches: list[tuple[Buffer, Buffer]]
    _used: int = field(default=0)
    _pushed: int = field(default=0)

    def next_cache(self) -> tuple[Buffer, Buffer]:
        """K and V cache of the next layer."""
        self._used += 1
        return self.caches[self._used - 1]

    def next_mlp_slots(self) -> Buffer:
        """Where the next blocks behind the embedding or an MLP go."""
        self._pushed += 1
        return self.mlp_slots[self._pushed % 2]


def make_buffers(
    graph: Graph,
    config: ModelConfig,
    shards: list[Shard],
    shapes: list[AttentionShape],
    *,
    keep_logits: bool,
    fused_partials: bool,
    exchanges: bool,
) -> DecodeBuffers:
    """Declare the buffers of `graph`. `lone`: whether a lone row of attention is merged by those who multiply it; `exchanges`:
    whether sums over ranks are pushed.
    """

    def rows(name: str, cols: int) -> Buffer:
        return graph.buffer(name, cols, rows=MAX_ROWS, space=Space.LOCAL)

    def turns(
        name: str, cols: int, num_writes: int, dtype: str = "bf16", lag: int = 1, spare: int = 0
    ) -> RotatingBuffers:
        return RotatingBuffers(graph, name, cols, MAX_ROWS, num_writes, dtype, lag, spare)

    num_layers = config.num_layers
    largest_part = max(shape.num_partials for shape in shapes)
    cache_cols = max(shape.cache_cols for shape in shapes)
    state_bytes = ctypes.sizeof(BatcherState) + 4 * shapes[0].num_pages
    vocab = max(shard.vocab[1] - shard.vocab[0] for shard in shards)
    slots = graph.num_ranks * MAX_ROWS * config.hidden_size if exchanges else 1
    local = Space.LOCAL
    return DecodeBuffers(
        batch=graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8"),
        page_table=graph.buffer("page_table", MAX_ROWS * shapes[0].max_pages, dtype="i32"),
        state=graph.buffer("batcher", state_bytes, dtype="u8", space=local),
        x=rows("x", config.hidden_size),
        x_bf16=turns("x_bf16", config.hidden_size, 1 + 2 * num_layers, lag=2, spare=1),
        qkv=turns("qkv", max(shape.qkv_cols for shape in shapes), num_layers, "f32"),
        partials=graph.buffer("attention_parts", largest_part, lamport=True),
        attn=turns("attention_out", max(shard.num_q for shard in shards) * config.head_dim, num_layers),
        fused_partials=RotatingBuffers(
            graph, "attention_lone", max(s.fused_partial_cols for s in shapes), 1, num_layers
        )
        if fused_partials
        else None,
        hidden=turns("mlp_hidden", max(shard.mlp[1] - shard.mlp[0] for shard in shards), num_layers, lag=2),
        attn_slots=graph.buffer("attention_slots", slots, lamport=True),
        mlp_slots=(
            graph.buffer("mlp_slots", slots, lamport=True),
            graph.buffer("mlp_slots1", slots, lamport=True),
        ),
        candidates=graph.buffer("candidates", graph.num_workers * CANDIDATES_BYTES, dtype="u8", space=local),
        sampled=graph.buffer("sampled", graph.num_ranks * CANDIDATES_BYTES, dtype="u8"),
        logits=rows("logits", vocab) if keep_logits else None,
        caches=[
            (
                graph.buffer(f"k_cache{layer}", cache_cols, dtype="bf16", space=local),
                graph.buffer(f"v_cache{layer}", cache_cols, dtype="bf16", space=local),
            )
            for layer in range(num_layers)
        ],
    )
