"""What a program takes beside its KV cache is known exactly before it is compiled; the number of pages follows from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.tiny_config import tiny_config

from distmk.backends.host import room
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine import kv_memory
from distmk.engine.kv_memory import KvMemory, rounded_down, with_kv_pages
from distmk.errors import UsageError
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program.fixed_memory import fixed_memory, page_bytes
from distmk.program.program import compile_graph


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(num_layers=1), {"num_workers": 3}),
        (tiny_config(num_layers=7, qkv_bias=True), {"num_ranks": 3, "num_workers": 2, "num_pages": 99}),
        (tiny_config("qwen3-8b", num_layers=6), {"num_workers": 4, "tiled": True, "attention_launch": "spread"}),
        (tiny_config(num_layers=9), {"num_ranks": 2, "host_sizes": (1, 1), "max_seqs": 3}),
        (tiny_config(num_layers=6, windows=(8, 8, 8, 8, 8, None)), {"num_workers": 2}),
    ],
)
def test_exact(config: ModelConfig, options: dict[str, Any]) -> None:
    made = DecodeOptions(max_model_len=256, **options)
    fixed, page = fixed_memory(config, dataclasses.replace(made, num_pages=made.max_pages)), page_bytes(config, made)
    for rank in compile_graph(*lower_programs(build_model(config), made)).ranks:
        whole = fixed.local[rank.header.rank] + made.total_pages * page
        assert whole <= rank.header.local_bytes + 256 * (config.num_layers + 1)  # gaps between caches
        assert rank.header.local_bytes <= whole + 256 * (config.num_layers + 1)
        assert fixed.heap <= rank.header.heap_bytes + (1 << 20) and rank.header.heap_bytes <= fixed.heap + (1 << 20)


def test_as_many_pages_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = tiny_config(num_layers=7), DecodeOptions(max_model_len=1024)
    fixed, page = fixed_memory(config, dataclasses.replace(options, num_pages=64)), page_bytes(config, options)

    def pages(room_for: float, share: float = 0.5, override: int | None = None) -> int:
        available = (
            int((fixed.local[0] + fixed.heap + kv_memory._uncounted_bytes(options) + room_for * page) / share) + 2
        )
        monkeypatch.setattr(kv_memory, "available_memory", lambda: available)
        asked = KvMemory(share, override)
        return with_kv_pages(config, options, asked, "host", SingleBootstrap(5.0)).num_pages

    assert [pages(n) for n in (64, 65, 79, 299, 1023)] == [64, 64, 72, 288, 960]
    assert pages(1024) == pages(99999, 0.9) == 0  # all that can be of use: the number that options stand for
    assert pages(1, override=777) == 777
    with pytest.raises(
        UsageError, match=r"one sequence of 1024 tokens takes 0\.0\d GB, weights and activations of a rank"
    ):
        pages(63.9)


def test_rounding() -> None:
    assert [rounded_down(n) for n in (1, 15, 16, 17, 100, 65535)] == [1, 15, 16, 16, 96, 61440]
    assert room.available_memory() > 0
