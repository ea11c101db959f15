"""Well-known public shapes, by name, for compiling and timing without weights.

The values are those of the published configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distmk.model.config import ModelConfig
from distmk.model.rope_scaling import Llama3Scaling


def _preset(family: str, sizes: tuple[int, ...], **other: Any) -> ModelConfig:
    """A config from (hidden, intermediate, layers, heads, kv heads, head_dim, vocab, max position)."""
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    values: dict[str, Any] = dict(zip((*names, "max_position"), sizes, strict=True))
    values |= {"family": family, "qk_norm": family == "qwen3", "rope_scaling": None}
    values |= {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    return ModelConfig(**values | other)


_QWEN3: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_ids": (151645, 151643),
}
_LLAMA3: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "tie_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_ids": (128001,),
}
_SMOLLM2: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_embeddings": True,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}

PRESETS: Mapping[str, ModelConfig] = {
    "smollm2-135m": _preset("llama", (576, 1536, 30, 9, 3, 64, 49152, 8192), **_SMOLLM2),
    "qwen3-0.6b": _preset("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, 40960), tie_embeddings=True, **_QWEN3),
    "qwen3-1.7b": _preset("qwen3", (2048, 6144, 28, 16, 8, 128, 151936, 40960), tie_embeddings=True, **_QWEN3),
    "qwen3-4b": _preset("qwen3", (2560, 9728, 36, 32, 8, 128, 151936, 40960), tie_embeddings=True, **_QWEN3),
    "qwen3-8b": _preset("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, 40960), tie_embeddings=False, **_QWEN3),
    "qwen3-32b": _preset("qwen3", (5120, 25600, 64, 64, 8, 128, 151936, 40960), tie_embeddings=False, **_QWEN3),
    "llama-3.1-8b": _preset("llama", (4096, 14336, 32, 32, 8, 128, 128256, 131072), **_LLAMA3),
    "llama-3.1-70b": _preset("llama", (8192, 28672, 80, 64, 8, 128, 128256, 131072), **_LLAMA3),
}
