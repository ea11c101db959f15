"""The memory of a program without its KV cache, computed before compilation because the size of the cache depends on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from distmk.abi import KvPage
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.model.shards import shard_model
from distmk.models import build_model
from distmk.program.layout import place

_FEW_LAYERS = 3  # from this number on, layers are alike
_BF16_BYTES = 2


@dataclass(frozen=True)
class FixedMemory:
    """Bytes of a program without its KV cache: each rank's arena, and the heap without events."""

    local: tuple[int, ...]
    heap: int


def fixed_memory(config: ModelConfig, options: DecodeOptions) -> FixedMemory:
    """The memory of a program, whatever its number of pages.

    If the layers are alike, the computation time does not depend on their number. Each later layer adds weights of the
    same size; its other data uses the buffers of earlier layers again.
    """
    if config.num_layers <= _FEW_LAYERS + 1 or not config.layers_are_alike:
        return _placed(config, options)
    few = _placed(config.first_layers(_FEW_LAYERS), options)
    more = _placed(config.first_layers(_FEW_LAYERS + 1), options)
    rest = config.num_layers - _FEW_LAYERS
    local = tuple(a + rest * (b - a) for a, b in zip(few.local, more.local, strict=True))
    return FixedMemory(local, max(few.heap, more.heap))


def page_bytes(config: ModelConfig, options: DecodeOptions) -> int:
    """Bytes of a KV cache page in all layers of a rank."""
    num_kv = max(shard.num_kv for shard in shard_model(config, options.num_ranks))
    cached = 2 * config.num_layers * num_kv * config.head_dim * options.page_size * _BF16_BYTES
    return cached + ctypes.sizeof(KvPage)


def _placed(config: ModelConfig, options: DecodeOptions) -> FixedMemory:
    graphs = lower_programs(build_model(config), options)
    placement = place(graphs, [0] * len(graphs))[0]
    cache = options.total_pages * page_bytes(config, options)
    return FixedMemory(tuple(size - cache for size in placement.local_bytes), placement.heap_bytes)
