"""The rotary scaling of a GGUF model."""

from __future__ import annotations

import math

from distmk.errors import ModelError, shown
from distmk.model.json_fields import Fields
from distmk.model.rope_scaling import LinearScaling, RopeScaling, YarnScaling, yarn_attention_factor


def gguf_rope_scaling(f: Fields, arch: str) -> RopeScaling | None:
    """The scaling in the metadata `f`; Llama 3.1's is a tensor instead. ModelError: a kind or a key that is not supported.

    As in llama.cpp, a factor without a type means linear scaling, the type none turns a factor off, and YaRN's attention factor
    follows from its factor, whatever `yarn_attn_factor` says.
    """
    prefix = f"{arch}.rope.scaling"
    kind = f.values.get(f"{prefix}.type", "linear")
    factor = f.number(f"{prefix}.factor", 0.0) or f.number(f"{arch}.rope.scale_linear", 0.0) or 1.0
    attention = f.number(f"{prefix}.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{f.where}: RoPE scaling {shown(kind)} is not supported; supported are none, linear and yarn")
    if not 1e-6 <= factor <= 1e6 or not 1e-6 <= attention <= 1e6:
        raise ModelError(f"{f.where}: {prefix}.factor and attn_factor must be positive, up to a million")
    if kind != "yarn":
        if attention != 1.0:
            raise ModelError(f"{f.where}: {prefix}.attn_factor is set, which is not supported without yarn")
        return None if kind == "none" or factor == 1.0 else LinearScaling(factor)
    if f.number(f"{prefix}.yarn_ext_factor", 1.0) != 1.0:
        raise ModelError(f"{f.where}: {prefix}.yarn_ext_factor is set, which is not supported")
    multiplier = f.number(f"{prefix}.yarn_log_multiplier", 0.0)
    own = yarn_attention_factor(factor)
    original = f.integer(f"{prefix}.original_context_length", f.integer(f"{arch}.context_length"))
    fast, slow = f.number(f"{prefix}.yarn_beta_fast", 32.0), f.number(f"{prefix}.yarn_beta_slow", 1.0)
    if not 1 <= original < 1 << 31 or not all(1e-6 <= beta <= 1e6 and math.isfinite(beta) for beta in (fast, slow)):
        raise ModelError(f"{f.where}: {prefix}.original_context_length and yarn_beta_* must be positive")
    if multiplier:
        own /= yarn_attention_factor(factor, multiplier)
    return YarnScaling(factor, original, own * attention, fast, slow)
