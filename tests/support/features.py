"""Models with what the families of the presets do not have: post-norms, no norm in front, GeGLU, scales, offsets of norms, a
softcap of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from distmk.model.bf16 import F32, bf16_to_f32, f32_to_bf16
from distmk.model.config import ModelConfig
from distmk.model.nodes import Node
from distmk.models.gemma2 import Gemma2
from distmk.models.granite import Granite
from distmk.models.llama import Llama


class Olmo(Llama):
    """As OLMo 2: norms behind attention and MLP, and none in front."""

    def block(self, x: Node, name: str, layer: int) -> Node:
        x = x + self.norm(self.attention(x, f"{name}.self_attn", layer), f"{name}.post_attention_layernorm")
        return x + self.norm(self.mlp(x, f"{name}.mlp"), f"{name}.post_feedforward_layernorm")


class Mixed(Llama):
    """Attention without a norm, and an MLP with one on either side."""

    def block(self, x: Node, name: str, layer: int) -> Node:
        x = x + self.attention(x, f"{name}.self_attn", layer)
        y = self.mlp(self.norm(x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
        return x + self.norm(y, f"{name}.post_feedforward_layernorm")


STYLES: Mapping[str, tuple[type[Llama], Mapping[str, Any]]] = {
    "gemma": (Gemma2, {"qk_norm": True, "logits_softcap": 2.5}),
    "granite": (Granite, {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_scale": 0.125}),
    "mixed": (Mixed, {}),
    "olmo": (Olmo, {}),
}
"""By style, the class, and what its config has beside that of a preset."""


def model_of(config: ModelConfig, style: str) -> Llama:
    cls, changes = STYLES[style]
    return cls(cls.Config(**vars(config) | changes))


def random_weights(model: Llama, rng: np.random.Generator) -> dict[str, F32]:
    """float32 values that bf16 has, such that logits are around 1."""
    found = {}
    for name, shape in model.weights().items():
        values = rng.standard_normal(shape)
        if len(shape) == 2:
            values /= shape[1] ** 0.5
        else:
            values = 0.3 * values if name.endswith(".bias") else 1 - model.norm_offset + 0.2 * values
        found[name] = bf16_to_f32(f32_to_bf16(values.astype(np.float32)))
    return found
