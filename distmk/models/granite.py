"""Granite 3 (IBM; transformers' GraniteForCausalLM): Llama with constant factors in four places."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import Scores
from distmk.errors import ModelError
from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(ModelConfig):
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of attention's and the MLP's outputs
    logits_scale: float = 1.0


@register_model("GraniteForCausalLM", "granite")
class Granite(Llama):
    Config = GraniteConfig
    config: GraniteConfig

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        embedding, residual, attention, logits = (f.number(name, 1.0) for name in names)
        if logits <= 0:
            raise ModelError(f"{f.where}: logits_scaling is {logits:g}; it must be positive")
        bias = f.flag("attention_bias")
        features = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": f.flag("mlp_bias"), "scores": Scores(attention)}
        features |= {"embedding_scale": embedding, "residual_scale": residual, "logits_scale": 1.0 / logits}
        return read_decoder(f, cls.family, features, own=names, bos=(1,), eos=(2,), config=GraniteConfig)

    def embed(self, tokens: Node) -> Node:
        return super().embed(tokens) * self.config.embedding_scale

    def attention(self, x: Node, name: str, layer: int) -> Node:
        return super().attention(x, name, layer) * self.config.residual_scale

    def mlp(self, x: Node, name: str) -> Node:
        return super().mlp(x, name) * self.config.residual_scale

    def head(self, x: Node) -> Node:
        return super().head(x) * self.config.logits_scale
