"""Mistral (arXiv:2310.06825): Llama; its first version has a sliding window in every layer."""

from __future__ import annotations

from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.read_config import read_decoder
from distmk.models.llama import Llama

WINDOW = 4096  # for a config without the key


@register_model("MistralForCausalLM", "mistral")
class Mistral(Llama):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        num_layers, has_window = read_num_layers(f), f.values.get("sliding_window", WINDOW) is not None
        windows = (f.integer("sliding_window", WINDOW),) * num_layers if has_window else ()
        features = {"windows": windows}
        return read_decoder(f, cls.family, features, num_kv_heads=8, max_position=131072, bos=(1,), eos=(2,))
