"""Gemma 3, text (arXiv:2503.19786): Gemma 2 with norms of query and key heads, no soft caps, and a rotary base for windows."""

from __future__ import annotations

from collections.abc import Mapping

from distmk.errors import ModelError
from distmk.model import nn
from distmk.model.causal_lm import register_model
from distmk.model.config import ModelConfig
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder
from distmk.model.rope import LOCAL_ROPE, ROPE
from distmk.models.gemma2 import DEFAULTS, OWN, Gemma2, read_features


@register_model("Gemma3ForCausalLM", "gemma3_text")
class Gemma3(Gemma2):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if f.values.get(key) is not None:
                raise ModelError(f"{f.where}: {key} is set, which this family does not have")
        f, local = _full_rope(f)
        features = read_features(f, every=6) | {"qk_norm": True, "local_rope_theta": local}
        return read_decoder(f, cls.family, features, own=OWN, max_position=131072, **DEFAULTS)

    def rotated(self, x: Node, layer: int) -> Node:
        return nn.rope(x, self.config.head_dim, LOCAL_ROPE if self.config.window(layer) else ROPE)


def _full_rope(f: Fields) -> tuple[Fields, float]:
    """The config with only the rotary parameters of layers without a window, and the base for layers with one."""
    ropes = f.sub("rope_parameters")
    local = ropes.sub("sliding_attention")
    if not local.values:
        values = {"rope_theta": 1e6, **f.values}
        return Fields(values, f.where), f.number("rope_local_base_freq", 10000.0)
    if local.values.get("rope_type", "default") != "default":
        raise ModelError(f"{local.where}: rope_type {local.values['rope_type']!r} is not supported; only 'default' is")
    full: Mapping[str, object] = ropes.sub("full_attention").values
    return Fields({**f.values, "rope_parameters": full}, f.where), local.number("rope_theta", 10000.0)
