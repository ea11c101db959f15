"""Every head, MLP column and vocabulary row is on one rank; KV heads are on every rank that uses them."""

from __future__ import annotations

import pytest
from support.tiny_config import tiny_config

from distmk.errors import UsageError
from distmk.model.shards import partition, shard_model


@pytest.mark.parametrize(("total", "num_parts"), [(1, 1), (7, 3), (8, 4), (331, 7), (3, 5)])
def test_a_partition_is_even(total: int, num_parts: int) -> None:
    ranges = partition(total, num_parts)
    sizes = [end - begin for begin, end in ranges]
    assert len(ranges) == num_parts and max(sizes) - min(sizes) <= 1
    assert [element for begin, end in ranges for element in range(begin, end)] == [*range(total)]


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_shards_cover_the_model(num_ranks: int) -> None:
    """Whether or not its sizes divide by the number of ranks."""
    config = tiny_config(num_heads=6, num_kv_heads=3, intermediate_size=129, vocab_size=331)
    shards = shard_model(config, num_ranks)
    for name, total in (("heads", 6), ("mlp", 129), ("vocab", 331)):
        assert [n for shard in shards for n in range(*getattr(shard, name))] == [*range(total)], name
    for shard in shards:
        assert {head // 2 for head in range(*shard.heads)} == {*range(*shard.kv_heads)}


def test_more_ranks_than_heads() -> None:
    with pytest.raises(UsageError, match="7 ranks are more than the model's 6 query heads; use at most 6"):
        shard_model(tiny_config(num_heads=6, num_kv_heads=3), 7)
