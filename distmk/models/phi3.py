"""Phi-3 (arXiv:2404.14219) and Phi-4-mini (arXiv:2503.01743): Llama, but checkpoints store q, k and v in one matrix,
and gate and up in another.

Phi-4-mini rotates three quarters of each head.
"""

from __future__ import annotations

from distmk.model import nn
from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama


@register_model("Phi3ForCausalLM", "phi3")
class Phi3(Llama):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        window = f.integer("sliding_window") if f.values.get("sliding_window") is not None else None
        f = Fields({"original_max_position_embeddings": 4096, **f.values}, f.where)
        features = {"windows": (window,) * read_num_layers(f) if window else ()}
        own = ("partial_rotary_factor",)
        return read_decoder(f, cls.family, features, own=own, max_position=4096, bos=(1,), eos=(32000,))

    def qkv(self, x: Node, name: str) -> list[Node]:
        c = self.config
        sizes = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        return nn.split(nn.linear(x, f"{name}.qkv_proj", sum(sizes)), sizes)

    def gate_up(self, x: Node, name: str) -> list[Node]:
        size = self.config.intermediate_size
        return nn.split(nn.linear(x, f"{name}.gate_up_proj", 2 * size), [size, size])
