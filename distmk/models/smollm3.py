"""SmolLM3 (Hugging Face): Llama without rotary embedding in every fourth layer (NoPE: Yang et al., arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distmk.errors import ModelError
from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(ModelConfig):
    BY_LAYER: ClassVar[tuple[str, ...]] = ("windows", "rotates")

    rotates: tuple[bool, ...] = ()  # by layer


@register_model("SmolLM3ForCausalLM", "smollm3")
class SmolLM3(Llama):
    Config = SmolLM3Config
    config: SmolLM3Config

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        num_layers, interval = read_num_layers(f), f.integer("no_rope_layer_interval", 4)
        rotates = f.values.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if len(rotates) != num_layers or not all(value in (0, 1) for value in rotates):
            raise ModelError(f"{f.where}: no_rope_layers is not a list of {num_layers} numbers 0 or 1")
        bias = f.flag("attention_bias")
        features = {
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": f.flag("mlp_bias"),
            "rotates": tuple(map(bool, rotates)),
        }
        own = ("no_rope_layers",)
        eos, bos = (128001,), (128000,)
        return read_decoder(
            f, cls.family, features, own=own, num_kv_heads=4, max_position=32768, bos=bos, eos=eos, config=cls.Config
        )

    def rotated(self, x: Node, layer: int) -> Node:
        return super().rotated(x, layer) if self.config.rotates[layer] else x
