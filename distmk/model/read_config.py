"""Reads the part of a `config.json` that most decoders share, for the families' `read_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distmk.errors import ModelError
from distmk.model.config import ModelConfig, build_config
from distmk.model.hf_features import read_num_layers, refuse_unsupported
from distmk.model.json_fields import Fields, token_ids
from distmk.model.rope import read_partial_rotary_dim, read_rope


def read_decoder(
    f: Fields,
    family: str,
    features: Mapping[str, Any],
    *,
    own: Collection[str] = (),
    max_position: int = 2048,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bos: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    tie_embeddings: bool = False,
    config: type[ModelConfig] = ModelConfig,
) -> ModelConfig:
    """The config made from Hugging Face's keys.

    Unknown keys that would change the result are refused, except `own`, which the family reads itself.

    max_position, num_kv_heads, head_dim, bos, eos, tie_embeddings: the meaning of absent keys, as in transformers'
      config of the family. None stands for as many KV heads as query heads, and for hidden_size / heads.
    features: further fields of `config`; other fields have their defaults.

    Reads `rope_theta` and `rope_scaling`, and the `rope_parameters` of transformers 5. ModelError: unusable values.
    """
    refuse_unsupported(f, own)
    num_heads, hidden_size = f.integer("num_attention_heads"), f.integer("hidden_size")
    if num_heads < 1:
        raise ModelError(f"{f.where}: num_attention_heads is {num_heads}; it must be at least 1")
    if num_kv_heads is None or "num_key_value_heads" in f.values:
        num_kv_heads = num_heads
    first = token_ids(f.values, "bos_token_id", f.where, bos)
    theta, scaling, longest = read_rope(f, max_position)
    head_dim = f.integer("head_dim", head_dim or hidden_size // num_heads)
    values: dict[str, Any] = {
        "family": family,
        "hidden_size": hidden_size,
        "intermediate_size": f.integer("intermediate_size"),
        "num_layers": read_num_layers(f),
        "num_heads": num_heads,
        "num_kv_heads": f.integer("num_key_value_heads", num_kv_heads),
        "head_dim": head_dim,
        "vocab_size": f.integer("vocab_size"),
        "max_position": longest,
        "rms_norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_dim": read_partial_rotary_dim(f, head_dim, "partial_rotary_factor" in own),
        "tie_embeddings": f.flag("tie_word_embeddings", tie_embeddings),
        "bos_token_id": first[0] if first else None,
        "eos_token_ids": token_ids(f.values, "eos_token_id", f.where, eos),
    }
    return build_config(values | dict(features), f.where, config)
