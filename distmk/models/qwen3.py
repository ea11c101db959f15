"""Qwen3 (arXiv:2505.09388): Llama with an RMSNorm of every query and key head."""

from __future__ import annotations

from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import layer_windows, read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama


@register_model("Qwen3ForCausalLM", "qwen3")
class Qwen3(Llama):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        bias, windows = f.flag("attention_bias"), layer_windows(f, read_num_layers(f), True)
        features = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": windows}
        own = ("use_qk_norm",)  # the family does this anyway
        return read_decoder(f, cls.family, features, own=own, num_kv_heads=32, head_dim=128, max_position=32768)
