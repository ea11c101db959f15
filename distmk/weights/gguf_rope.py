"""The rotary scaling of a GGUF model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from distmk.errors import ModelError, shown
from distmk.model.rope_scaling import (
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from distmk.weights.gguf_families import LONG_FACTORS, SHORT_FACTORS
from distmk.weights.gguf_metadata import ArchMetadata

Factors = Mapping[str, tuple[float, ...]]
"""Contents of a file's tensors of rotary factors, by their names without `.weight`."""

_PREFIX = "rope.scaling"


def gguf_rope_scaling(metadata: ArchMetadata, factors: Factors) -> RopeScaling | None:
    """The scaling of a file; Llama 3.1's is a tensor instead. ModelError: a kind or a key is not supported.

    As in llama.cpp, a factor without a type means linear scaling, the type none turns a factor off, and YaRN's
    attention factor follows from its factor, whatever `yarn_attn_factor` says. Files of Phi-3 have no type: LongRoPE's
    tensors are enough.
    """
    where, prefix = metadata.where, metadata.name(_PREFIX)
    tensors = factors.keys() & {LONG_FACTORS, SHORT_FACTORS}
    kind = metadata.scalars.values.get(f"{prefix}.type", "longrope" if tensors else "linear")
    factor = metadata.number(f"{_PREFIX}.factor", 0.0) or metadata.number("rope.scale_linear", 0.0) or 1.0
    attention = metadata.number(f"{_PREFIX}.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(
            f"{where}: RoPE scaling {shown(kind)} is not supported; supported are none, linear, yarn and longrope"
        )
    if len(tensors) != (2 if kind == "longrope" else 0):
        raise ModelError(
            f"{where}: RoPE scaling {kind} with {len(tensors)} of the tensors {LONG_FACTORS} and {SHORT_FACTORS}; "
            "longrope was expected with both, others with none"
        )
    if not 1e-6 <= factor <= 1e6 or not 1e-6 <= attention <= 1e6:
        raise ModelError(f"{where}: {prefix}.factor and attn_factor must be positive, up to a million")
    if kind == "longrope":
        if factor != 1.0:
            raise ModelError(f"{where}: {prefix}.factor is set, which is not supported beside longrope")
        return LongRopeScaling(_trained_length(metadata), attention, factors[SHORT_FACTORS], factors[LONG_FACTORS])
    if kind == "yarn":
        return _yarn(metadata, factor, attention)
    if attention != 1.0:
        raise ModelError(f"{where}: {prefix}.attn_factor is set, which is not supported without yarn or longrope")
    return None if kind == "none" or factor == 1.0 else LinearScaling(factor)


def _yarn(metadata: ArchMetadata, factor: float, attention: float) -> YarnScaling:
    prefix = metadata.name(_PREFIX)
    if metadata.number(f"{_PREFIX}.yarn_ext_factor", 1.0) != 1.0:
        raise ModelError(f"{metadata.where}: {prefix}.yarn_ext_factor is set, which is not supported")
    fast, slow = (
        metadata.number(f"{_PREFIX}.yarn_beta_{end}", rotations) for end, rotations in (("fast", 32.0), ("slow", 1.0))
    )
    if not all(1e-6 <= beta <= 1e6 and math.isfinite(beta) for beta in (fast, slow)):
        raise ModelError(f"{metadata.where}: {prefix}.yarn_beta_fast and yarn_beta_slow must be positive")
    multiplier, own = metadata.number(f"{_PREFIX}.yarn_log_multiplier", 0.0), yarn_attention_factor(factor)
    if multiplier:
        own /= yarn_attention_factor(factor, multiplier)
    return YarnScaling(factor, _trained_length(metadata), own * attention, fast, slow)


def _trained_length(metadata: ArchMetadata) -> int:
    """The length of pretraining, in tokens."""
    key = f"{_PREFIX}.original_context_length"
    length = metadata.integer(key, metadata.integer("context_length"))
    if not 1 <= length < 1 << 31:
        raise ModelError(f"{metadata.where}: {metadata.name(key)} is {length}; it must be positive and below 2**31")
    return length
