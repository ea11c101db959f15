"""The GGUF architectures that can be read, each with an entry in FAMILIES.

Sources: llama.cpp's converter from Hugging Face (`convert_hf_to_gguf.py`), which writes the files, and its own model
code, which defines the meaning of absent keys. Names of tensors are those of the gguf package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distmk.abi import Scores
from distmk.errors import ModelError
from distmk.weights.gguf_header import GgufHeader
from distmk.weights.gguf_metadata import ArchMetadata

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QUERY_NORM = "attn_q_norm"
HEAD_NORMS = {QUERY_NORM: "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_LAYER = {
    **{name: LLAMA_LAYER[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}

ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs", "rope_factors_long", "rope_factors_short"
"""Tensors of rotary factors: Llama 3.1's, and the two of LongRoPE."""


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """How files of one architecture store a model.

    family: of the model's class (`distmk.models`).
    layer: Hugging Face names of a layer's tensors, by their names in files.
    permutes_heads: whether the rows of Q and K are permuted within each head (`stored_rows`).
    norm_shift: the number that the converter added to the weights of norms.
    rotates_in_part: whether it is possible that only some elements of a head rotate.
    rope_factors: tensors of rotary factors that the architecture applies.
    full_every: in a model with a sliding window, the last of every `full_every` layers has none; 0: all layers have it;
      None: the files do not say which layers have it.
    usual_window: the window in tokens if the metadata does not have the key.
    keys: metadata for which other architectures are refused.
    features: further fields of the config, from the metadata of a model whose number of layers has been checked.
    """

    family: str
    layer: Mapping[str, str]
    permutes_heads: bool = False
    norm_shift: float = 0.0
    rotates_in_part: bool = False
    rope_factors: tuple[str, ...] = ()
    full_every: int | None = None
    usual_window: int = 0
    keys: tuple[str, ...] = ()
    features: Callable[[ArchMetadata], dict[str, Any]] = lambda _: {}

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a tensor; an unknown name is returned unchanged."""
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer and layer[2] in self.layer:
            return f"model.layers.{layer[1]}.{self.layer[layer[2]]}.{kind}"
        return f"{OUTSIDE_LAYERS[stem]}.{kind}" if stem in OUTSIDE_LAYERS else name


def _gemma2(metadata: ArchMetadata) -> dict[str, Any]:
    return {
        "scores": Scores(_gemma_scale(metadata, layers_of_27b=46), metadata.number("attn_logit_softcapping", 50.0)),
        "logits_softcap": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: ArchMetadata) -> dict[str, Any]:
    return {
        "scores": Scores(_gemma_scale(metadata, layers_of_27b=62)),
        "local_rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
        "logits_softcap": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma_scale(metadata: ArchMetadata, layers_of_27b: int) -> float:
    """The scale of attention's scores, which the files do not contain.

    The largest model of each generation scales by its width, the others by their head size.
    """
    per_head = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    is_27b = metadata.integer("block_count") == layers_of_27b
    size = per_head if is_27b else metadata.integer("attention.key_length", per_head)
    scale: float = max(1, size) ** -0.5
    return scale


def _granite(metadata: ArchMetadata) -> dict[str, Any]:
    if not metadata.flag("rope.scaling.finetuned", True):
        what = f"{metadata.name('rope.scaling.finetuned')} is false, which means a model without rotary embedding"
        raise ModelError(f"{metadata.where}: {what}, and is not supported")
    divisor = metadata.number("logit_scale")
    if divisor <= 0:
        raise ModelError(f"{metadata.where}: {metadata.name('logit_scale')} is {divisor:g}; it must be positive")
    return {
        "scores": Scores(metadata.number("attention.scale", 0.0) or None),
        "embedding_scale": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_scale": metadata.number("residual_scale", 0.0) or 1.0,
        "logits_scale": 1.0 / divisor,
    }


def _smollm3(metadata: ArchMetadata) -> dict[str, Any]:
    """Every fourth layer has no rotary embedding, which the files do not say."""
    return {"rotates": tuple((layer + 1) % 4 != 0 for layer in range(metadata.integer("block_count")))}


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(  # Llama, and Mistral, whose layers all have a window
        family="llama",
        layer=LLAMA_LAYER,
        permutes_heads=True,
        rope_factors=(ROPE_FREQS,),
        full_every=0,
    ),
    "qwen2": GgufFamily(family="qwen2", layer=LLAMA_LAYER),
    "qwen3": GgufFamily(family="qwen3", layer=LLAMA_LAYER | HEAD_NORMS),
    "phi3": GgufFamily(  # Phi-3, and Phi-4-mini, in which a quarter of each head does not rotate
        family="phi3",
        layer=PHI3_LAYER,
        rotates_in_part=True,
        rope_factors=(LONG_FACTORS, SHORT_FACTORS),
        full_every=0,
    ),
    "gemma2": GgufFamily(
        family="gemma2",
        layer=LLAMA_LAYER | GEMMA_NORMS,
        norm_shift=1.0,
        full_every=2,
        usual_window=4096,
        keys=("attn_logit_softcapping", "final_logit_softcapping"),
        features=_gemma2,
    ),
    "gemma3": GgufFamily(
        family="gemma3_text",
        layer=LLAMA_LAYER | GEMMA_NORMS | HEAD_NORMS,
        norm_shift=1.0,
        full_every=6,
        keys=("rope.freq_base_swa", "final_logit_softcapping"),
        features=_gemma3,
    ),
    "granite": GgufFamily(
        family="granite",
        layer=LLAMA_LAYER,
        permutes_heads=True,
        rope_factors=(ROPE_FREQS,),
        keys=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        features=_granite,
    ),
    "smollm3": GgufFamily(family="smollm3", layer=LLAMA_LAYER, permutes_heads=True, features=_smollm3),
}
"""The families by `general.architecture`."""


def family_of(header: GgufHeader) -> tuple[str, GgufFamily]:
    """The architecture of a file, and its entry. ModelError: it has no entry."""
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ModelError(
            f"{header.path}: GGUF architecture {arch!s} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return arch, FAMILIES[arch]
