"""Models of operators that the families of the presets do not have: post-norms, no norm in front, GeGLU, scales, offsets, a
softcap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from distmk.model.config import ModelConfig
from distmk.model.operators import Embedding, Head, Mlp, Model, Operator, SelfAttention
from distmk.models import build_model


def with_out_scale(op: SelfAttention | Mlp, scale: float) -> SelfAttention | Mlp:
    """A factor of what an operator adds to x."""
    if isinstance(op, SelfAttention):
        return dataclasses.replace(op, o=dataclasses.replace(op.o, scale=scale))
    return dataclasses.replace(op, down=dataclasses.replace(op.down, scale=scale))


def _gemma(op: Operator) -> Operator:
    """As Gemma 2: norms on both sides, of weights stored less 1; the embedding scaled, the logits within a limit."""
    if isinstance(op, Embedding):
        return dataclasses.replace(op, scale=9.75)
    if isinstance(op, Head):
        return dataclasses.replace(op, norm_offset=1.0, softcap=2.5)
    changed = dataclasses.replace(op, norm_offset=1.0, post_norm=f"{op.norm}.post")
    return changed if isinstance(op, SelfAttention) else dataclasses.replace(changed, activation="gelu_tanh")


def _olmo(op: Operator) -> Operator:
    """As OLMo 2: norms behind the projections, and none in front."""
    return dataclasses.replace(op, norm=None, post_norm=op.norm) if isinstance(op, SelfAttention | Mlp) else op


def _granite(op: Operator) -> Operator:
    """As Granite 3: a factor of the embedding, of what is added to x, and of the logits."""
    if isinstance(op, Embedding):
        return dataclasses.replace(op, scale=12.0)
    return dataclasses.replace(op, scale=0.125) if isinstance(op, Head) else with_out_scale(op, 0.22)


def _mixed(op: Operator) -> Operator:
    """Attention without a norm, and an MLP with one on either side."""
    if isinstance(op, SelfAttention):
        return dataclasses.replace(op, norm=None)
    return dataclasses.replace(op, post_norm=f"{op.norm}.post") if isinstance(op, Mlp) else op


STYLES: dict[str, Callable[[Operator], Operator]] = {
    "gemma": _gemma,
    "olmo": _olmo,
    "granite": _granite,
    "mixed": _mixed,
}


def model_of(config: ModelConfig, style: str) -> Model:
    return Model(config, tuple(map(STYLES[style], build_model(config).operators)))
