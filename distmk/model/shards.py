"""Which part of a model each rank holds. Anything is dealt to within one, whether or not it divides."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.errors import UsageError
from distmk.model.config import ModelConfig


def deal(total: int, num_partials: int, part: int) -> tuple[int, int]:
    """The half-open range of `part` when `total` things are dealt out in order, to within one."""
    return total * part // num_partials, total * (part + 1) // num_partials


@dataclass(frozen=True)
class Shard:
    """One rank's heads, MLP columns and vocabulary (half-open ranges over the whole model).

    KV heads are those that the rank's query heads use; one that query heads of two ranks share is held by both.
    """

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    mlp: tuple[int, int]
    vocab: tuple[int, int]

    @property
    def num_q(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def shard_model(config: ModelConfig, num_ranks: int) -> list[Shard]:
    """The shards of `num_ranks` ranks; UsageError where there are more ranks than query heads."""
    if num_ranks > config.num_heads:
        raise UsageError(
            f"{num_ranks} ranks are more than the model's {config.num_heads} query heads; use at most {config.num_heads}"
        )
    group = config.num_heads // config.num_kv_heads
    shards = []
    for rank in range(num_ranks):
        begin, end = deal(config.num_heads, num_ranks, rank)
        shards.append(
            Shard(
                heads=(begin, end),
                kv_heads=(begin // group, (end - 1) // group + 1),
                mlp=deal(config.intermediate_size, num_ranks, rank),
                vocab=deal(config.vocab_size, num_ranks, rank),
            )
        )
    return shards
