"""Models small enough to compile and run in a moment."""

from __future__ import annotations

import dataclasses
from typing import Any

from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 16,
    "vocab_size": 331,
    "max_position": 64,
    "tie_embeddings": False,
}


def tiny_config(preset: str = "smollm2-135m", **changes: Any) -> ModelConfig:
    """The config of a preset, with SIZES and `changes` in place of its own values."""
    return dataclasses.replace(PRESETS[preset], **(SIZES | changes))
