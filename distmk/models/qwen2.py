"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases for queries, keys and values, whatever the config says."""

from __future__ import annotations

from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import layer_windows, read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama


@register_model("Qwen2ForCausalLM", "qwen2")
class Qwen2(Llama):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        windows = layer_windows(f, read_num_layers(f), True)
        features = {"qkv_bias": True, "windows": windows}
        return read_decoder(f, cls.family, features, num_kv_heads=32, max_position=32768)
