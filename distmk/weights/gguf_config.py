"""The configuration of a GGUF model, from its metadata and tensor table."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmk.errors import ModelError
from distmk.model.config import ModelConfig, build_config, check_num_layers
from distmk.model.json_fields import Fields
from distmk.model.rope_scaling import context_length
from distmk.weights.gguf_header import GgufHeader
from distmk.weights.gguf_keys import check_keys
from distmk.weights.gguf_parts import scalars
from distmk.weights.gguf_rope import gguf_rope_scaling
from distmk.weights.gguf_stop_tokens import stop_token_ids

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def config_from_header(header: GgufHeader, rope_freq_factors: tuple[float, ...] | None) -> ModelConfig:
    """The config of a GGUF file's metadata and tensor table; ModelError if it is not supported.

    Biases and tied embeddings are not in the metadata: they follow from the tensors in the table.
    """
    arch = architecture(header)
    where = str(header.path)
    f = scalars(header)
    check_keys(header, f, arch)
    shapes = {t.name: t.shape for t in header.tensors}
    hidden, num_heads = f.integer(f"{arch}.embedding_length"), f.integer(f"{arch}.attention.head_count")
    if num_heads < 1:
        raise ModelError(f"{where}: {arch}.attention.head_count is {num_heads}; it must be at least 1")
    head_dim = f.integer(f"{arch}.attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if f.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise ModelError(
                f"{where}: {arch}.{key} is {f.integer(f'{arch}.{key}')}; only the head size, {head_dim}, is supported"
            )
    scaling = gguf_rope_scaling(f, arch)
    embedding = shapes.get("token_embd.weight")
    bos = f.integer("tokenizer.ggml.bos_token_id", -1)
    values: dict[str, Any] = {
        "family": arch,
        "hidden_size": hidden,
        "intermediate_size": f.integer(f"{arch}.feed_forward_length"),
        "num_layers": f.integer(f"{arch}.block_count"),
        "num_heads": num_heads,
        "num_kv_heads": f.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding[0] if embedding else f.integer(f"{arch}.vocab_size"),
        **_context(f, arch, context_length(scaling, f.integer(f"{arch}.context_length"))),
        # Stored as float32; its shortest decimal form is what the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(f.number(f"{arch}.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(str(np.float32(f.number(f"{arch}.rope.freq_base", 10000.0)))),
        "rope_scaling": scaling,
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "o_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "qk_norm": arch == "qwen3",
        "bos_token_id": bos if bos >= 0 else None,
        "eos_token_ids": stop_token_ids(header, f),
        "rope_freq_factors": rope_freq_factors,
    }
    return build_config(values, where)


def _context(f: Fields, arch: str, max_position: int) -> dict[str, Any]:
    """The longest context, and the windows of layers: a Llama with a window is a Mistral, whose layers all have it. The metadata
    of other models do not say which layers do, so their context must fit into it.
    """
    window = f.integer(f"{arch}.attention.sliding_window", 0)
    if not window or arch != "llama":
        return {"max_position": min(max_position, window or max_position)}
    num_layers = f.integer(f"{arch}.block_count")
    check_num_layers(num_layers, f.where)
    return {"max_position": max_position, "windows": (window,) * num_layers}


def architecture(header: GgufHeader) -> str:
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {arch!s} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(arch)
