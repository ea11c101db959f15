"""The part of a model that each rank has. Heads, MLP columns and vocabulary need not be divisible by the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.errors import UsageError
from distmk.model.config import ModelConfig

Range = tuple[int, int]
"""A half-open range [begin, end)."""


def partition(total: int, num_parts: int) -> tuple[Range, ...]:
    """`num_parts` consecutive ranges that cover [0, total). Their sizes differ by at most one."""
    return tuple((total * part // num_parts, total * (part + 1) // num_parts) for part in range(num_parts))


@dataclass(frozen=True)
class Shard:
    """One rank's query heads, KV heads, MLP columns and vocabulary rows, as ranges over the whole model.

    `kv_heads` are the KV heads that the rank's query heads use. If query heads of two ranks use a KV head, both ranks
    have it.
    """

    heads: Range
    kv_heads: Range
    mlp: Range
    vocab: Range

    @property
    def num_q(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def shard_model(config: ModelConfig, num_ranks: int) -> list[Shard]:
    """The shards of `num_ranks` ranks, in rank order (tensor parallelism: Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

    Raises UsageError if there are more ranks than query heads.
    """
    if num_ranks > config.num_heads:
        raise UsageError(
            f"{num_ranks} ranks are more than the model's {config.num_heads} query heads; use at most {config.num_heads}"
        )
    group = config.num_heads // config.num_kv_heads
    ranges = (partition(n, num_ranks) for n in (config.num_heads, config.intermediate_size, config.vocab_size))
    return [
        Shard(heads=(begin, end), kv_heads=(begin // group, (end - 1) // group + 1), mlp=mlp, vocab=vocab)
        for (begin, end), mlp, vocab in zip(*ranges, strict=True)
    ]
