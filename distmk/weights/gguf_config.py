"""The configuration of a GGUF model, from its metadata and tensor table."""

from __future__ import annotations

from typing import Any

from distmk.errors import ModelError
from distmk.model.causal_lm import find_family
from distmk.model.config import ModelConfig, build_config, check_num_layers
from distmk.model.rope_scaling import context_length
from distmk.weights.gguf_families import QUERY_NORM, ROPE_FREQS, GgufFamily
from distmk.weights.gguf_keys import check_keys
from distmk.weights.gguf_metadata import ArchMetadata
from distmk.weights.gguf_rope import Factors, gguf_rope_scaling
from distmk.weights.gguf_stop_tokens import stop_token_ids

_HEAD_SIZES = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")


def config_of(metadata: ArchMetadata, family: GgufFamily, factors: Factors) -> ModelConfig:
    """The config of a GGUF file's metadata and tensor table. ModelError: it is not supported.

    Biases and tied embeddings are not in the metadata; they follow from the tensors in the table.
    """
    where = metadata.where
    check_keys(metadata, family)
    shapes = {t.name: t.shape for t in metadata.header.tensors}
    hidden, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if num_heads < 1:
        raise ModelError(f"{where}: {metadata.name('attention.head_count')} is {num_heads}; it must be at least 1")
    num_layers = metadata.integer("block_count")
    check_num_layers(num_layers, where)
    scaling = gguf_rope_scaling(metadata, factors)
    embedding = shapes.get("token_embd.weight")
    head_dim = _head_dim(metadata, hidden // num_heads)
    bos = metadata.scalars.integer("tokenizer.ggml.bos_token_id", -1)
    values: dict[str, Any] = {
        "family": family.family,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "partial_rotary_dim": _partial_rotary_dim(metadata, family, head_dim),
        "vocab_size": embedding[0] if embedding else metadata.integer("vocab_size"),
        **_context(metadata, family, context_length(scaling, metadata.integer("context_length"))),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": scaling,
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "o_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "qk_norm": QUERY_NORM in family.layer,
        "bos_token_id": bos if bos >= 0 else None,
        "eos_token_ids": stop_token_ids(metadata.header, metadata.scalars),
        "rope_freq_factors": factors.get(ROPE_FREQS),
    }
    model = find_family(family.family)
    return build_config(values | family.features(metadata), where, model.Config if model else ModelConfig)


def _head_dim(metadata: ArchMetadata, default: int) -> int:
    """The size of all heads. ModelError: some heads have other sizes."""
    head_dim = metadata.integer("attention.key_length", default)
    for key in _HEAD_SIZES:
        _check_size(metadata, key, head_dim)
    return head_dim


def _partial_rotary_dim(metadata: ArchMetadata, family: GgufFamily, head_dim: int) -> int | None:
    """The number of elements of a head that rotate; None: all.

    ModelError: only some rotate, which models of the family do not support.
    """
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated == head_dim or not family.rotates_in_part:
        _check_size(metadata, "rope.dimension_count", head_dim)
    _check_size(metadata, "rope.dimension_count_swa", rotated)
    return None if rotated == head_dim else rotated


def _check_size(metadata: ArchMetadata, key: str, expected: int) -> None:
    size = metadata.integer(key, expected)
    if size != expected:
        raise ModelError(f"{metadata.where}: {metadata.name(key)} is {size}; only {expected} is supported")


def _context(metadata: ArchMetadata, family: GgufFamily, max_position: int) -> dict[str, Any]:
    """The longest context, and the windows of layers.

    If a file does not say which layers have a window, contexts must fit into it.
    """
    window = metadata.integer("attention.sliding_window", family.usual_window)
    if not window:
        return {"max_position": max_position}
    windowed = _windowed_layers(metadata, family)
    if windowed is None:
        return {"max_position": min(max_position, window)}
    return {"max_position": max_position, "windows": tuple(window if each else None for each in windowed)}


def _windowed_layers(metadata: ArchMetadata, family: GgufFamily) -> list[bool] | None:
    """For each layer, whether it has a window; None: the file does not say."""
    key, num_layers = "attention.sliding_window_pattern", metadata.integer("block_count")
    if metadata.is_array(key):
        flags = [bool(flag) for flag in metadata.array(key)]
        if len(flags) != num_layers:
            raise ModelError(f"{metadata.where}: {metadata.name(key)} has {len(flags)} values for {num_layers} layers")
        return flags
    every = metadata.integer(key, -1 if family.full_every is None else family.full_every)
    if every < 0:
        return None
    return [every == 0 or (layer + 1) % every != 0 for layer in range(num_layers)]
