"""Gemma 2 (arXiv:2408.00118): GeGLU, norms before and after attention and MLP, soft caps, windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distmk.abi import Scores
from distmk.errors import ModelError
from distmk.model import nn
from distmk.model.bf16 import bf16_to_f32, f32_to_bf16
from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import FULL, WINDOWED, layer_types, read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama

OWN = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act")
DEFAULTS: Mapping[str, Any] = {"num_kv_heads": 4, "head_dim": 256, "bos": (2,), "eos": (1,), "tie_embeddings": True}


@register_model("Gemma2ForCausalLM", "gemma2")
class Gemma2(Llama):
    norm_offset = 1.0  # a weight of 0 leaves its column unchanged
    activate = staticmethod(nn.gelu_tanh)

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        features = read_features(f, every=2)
        features["scores"] = replace(features["scores"], softcap=_cap(f, "attn_logit_softcapping", 50.0))
        features["logits_softcap"] = _cap(f, "final_logit_softcapping", 30.0)
        return read_decoder(f, cls.family, features, own=OWN, max_position=8192, **DEFAULTS)

    def embed(self, tokens: Node) -> Node:
        return super().embed(tokens) * _embedding_scale(self.config.hidden_size)

    def block(self, x: Node, name: str, layer: int) -> Node:
        y = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", layer)
        x = x + self.norm(y, f"{name}.post_attention_layernorm")
        y = self.mlp(self.norm(x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
        return x + self.norm(y, f"{name}.post_feedforward_layernorm")

    def head(self, x: Node) -> Node:
        logits, cap = super().head(x), self.config.logits_softcap
        return nn.softcap(logits, cap) if cap else logits


def read_features(f: Fields, every: int) -> dict[str, Any]:
    """The features that Gemma 2 and 3 share. Without `layer_types`, every `every`-th layer has no window."""
    function = f.values.get("hidden_activation") or f.values.get("hidden_act") or "gelu_pytorch_tanh"
    if function != "gelu_pytorch_tanh":
        raise ModelError(f"{f.where}: hidden_activation {function!r} is not supported; only 'gelu_pytorch_tanh' is")
    num_layers, window = read_num_layers(f), f.integer("sliding_window", 4096)
    default = [WINDOWED if (layer + 1) % every else FULL for layer in range(num_layers)]
    kinds, bias = layer_types(f, f.values.get("layer_types") or default, num_layers), f.flag("attention_bias")
    scale = f.number("query_pre_attn_scalar", 256.0)
    if scale <= 0:
        raise ModelError(f"{f.where}: query_pre_attn_scalar is {scale:g}; it must be positive")
    windows = tuple(window if kind == WINDOWED else None for kind in kinds)
    return {"windows": windows, "scores": Scores(scale**-0.5), "qkv_bias": bias, "o_bias": bias}


def _cap(f: Fields, key: str, default: float) -> float | None:
    return None if key in f.values and f.values[key] is None else f.number(key, default)


def _embedding_scale(hidden_size: int) -> float:
    """The square root, rounded to bfloat16 as in the authors' code."""
    return float(bf16_to_f32(f32_to_bf16(np.sqrt(np.array([hidden_size], np.float32))))[0])
