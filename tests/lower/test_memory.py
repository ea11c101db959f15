"""The estimate of a program's memory is a lower bound of what the compiled program takes, and close to it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from support.tiny_config import tiny_config
from support.yardstick import slowness

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, Space
from distmk.lower import DecodeOptions, lower_programs
from distmk.lower.memory import least_memory
from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS
from distmk.models import build_model
from distmk.program.program import compile_graph

FORMATS = (
    *((f"model.layers.{i}.self_attn.o_proj", "int4") for i in range(30)),
    *((f"model.layers.{i}.mlp.down_proj", "q4_k") for i in range(30)),
    *((f"model.layers.{i}.mlp.{name}_proj", "fp8") for name in ("gate", "up") for i in range(30)),
    ("model.embed_tokens", "q8_0"),
)
TWO_LAYERS = dataclasses.replace(PRESETS["qwen3-8b"], num_layers=2)


@pytest.mark.parametrize(
    ("config", "options", "close"),
    [
        (TWO_LAYERS, {"max_model_len": 4096}, 0.99),
        (TWO_LAYERS, {"num_ranks": 4, "num_workers": 2, "max_model_len": 40960, "max_seqs": 4}, 0.97),
        (TWO_LAYERS, {"num_ranks": 2, "host_sizes": (1, 1), "max_model_len": 4096, "num_pages": 299}, 0.98),
        (PRESETS["smollm2-135m"], {"num_ranks": 2, "max_model_len": 8192}, 0.9),
        (tiny_config(qkv_bias=True, mlp_bias=True), {"num_ranks": 5, "max_model_len": 64}, 0.2),
        (dataclasses.replace(PRESETS["smollm2-135m"], formats=FORMATS), {"num_ranks": 2, "max_model_len": 8192}, 0.9),
        (tiny_config("qwen3-8b", tie_embeddings=True), {"loopback": True, "max_model_len": 7, "tiled": True}, 0.2),
    ],
)
def test_close_lower_bound(config: ModelConfig, options: dict[str, Any], close: float) -> None:
    made = DecodeOptions(**options)
    need = least_memory(config, made)
    assert not need.jobs
    for rank in compile_graph(*lower_programs(build_model(config), made)).ranks:
        private, heap = need.weights + need.kv_cache, rank.header.heap_bytes
        assert close * rank.header.local_bytes <= private <= rank.header.local_bytes
        assert need.heap <= heap


@pytest.mark.parametrize(("num_ranks", "tiled"), [(1, False), (1, True), (3, False), (3, True)])
def test_close_lower_bound_of_job_iterations(num_ranks: int, tiled: bool) -> None:
    without = DecodeOptions(num_ranks, max_model_len=64, tiled=tiled)
    options = dataclasses.replace(without, row_buckets=(MAX_ROWS, MAX_BUCKET_ROWS))
    slabs, jobs = lower_programs(build_model(TWO_LAYERS), options)
    need, least = least_memory(TWO_LAYERS, options), least_memory(TWO_LAYERS, without)
    assert (need.weights, need.kv_cache) == (least.weights, least.kv_cache)
    alone = least_memory(TWO_LAYERS, dataclasses.replace(options, row_buckets=(MAX_BUCKET_ROWS,)))
    assert alone == dataclasses.replace(need, heap=need.heap - least.heap)
    own = [buffer for buffer in jobs.buffers if buffer not in slabs.buffers and not buffer.name.startswith("sampled")]
    for space, bound in ((Space.LOCAL, need.jobs), (Space.HEAP, need.heap - least.heap)):
        num_bytes = sum(buffer.num_bytes for buffer in own if buffer.space is space)
        assert 0.98 * num_bytes <= bound <= num_bytes


def test_takes_no_time() -> None:
    sizes = {"vocab_size": 2**31 - 1, "num_heads": 2**20, "num_kv_heads": 2**20, "head_dim": 2**20, "num_layers": 1024}
    times_s = []
    for _ in range(3):  # the collector of garbage may hold up one
        began_s = time.process_time()
        options = DecodeOptions(num_ranks=64, max_model_len=1 << 24)
        need = least_memory(tiny_config(**sizes, hidden_size=2**31 - 1), options)
        times_s.append(time.process_time() - began_s)
    assert min(times_s) < 0.1 * slowness()
    assert min(need.weights, need.kv_cache) > 1 << 62
