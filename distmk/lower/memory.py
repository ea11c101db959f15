"""An estimate of a program's memory from its config and options alone, for a refusal before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import MAX_ROWS
from distmk.lower.options import DecodeOptions
from distmk.model.config import ModelConfig
from distmk.model.shards import shard_model

BF16_BYTES = 2
F32_BYTES = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a rank: private ones by use, and those in the symmetric heap."""

    weights: int
    kv_cache: int
    heap: int


def least_memory(config: ModelConfig, options: DecodeOptions) -> MemoryNeed:
    """A lower bound of what each rank needs, as the smallest shard's weights and the largest allocations alone are counted.

    Takes no time that depends on the sizes. UsageError: there are more ranks than query heads.
    """
    shards = shard_model(config, options.num_ranks)
    hidden, head_dim = config.hidden_size, config.head_dim
    num_q, num_kv = (min(getattr(shard, name) for shard in shards) for name in ("num_q", "num_kv"))
    mlp_cols, vocab_rows = config.intermediate_size // options.num_ranks, config.vocab_size // options.num_ranks
    layer = hidden * (2 * (num_q + num_kv) * head_dim + 3 * mlp_cols)
    tables = 2 * vocab_rows * hidden  # a tied head is a copy, multiplied by the weight of the norm before it
    rope = options.max_model_len * head_dim * F32_BYTES
    cached = 2 * max(shard.num_kv for shard in shards) * head_dim * options.total_pages * options.page_size
    pushed = 3 * options.num_ranks if options.all_reduces and not options.crosses_hosts else 0
    return MemoryNeed(
        weights=(config.num_layers * layer + tables) * BF16_BYTES + rope,
        kv_cache=config.num_layers * cached * BF16_BYTES,
        heap=pushed * MAX_ROWS * hidden * F32_BYTES,
    )
