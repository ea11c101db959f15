"""Models of operators that the families of the presets do not have: post-norms, no norm in front, GeGLU, scales, offsets, a
softcap. Their weights are random, in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distmk.model.config import ModelConfig
from distmk.model.operators import Embedding, Head, Mlp, Model, Operator, SelfAttention, build_model
from distmk.weights.bf16 import F32, U16, bf16_to_f32, f32_to_bf16


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
    return dataclasses.replace(op, scale=0.125) if isinstance(op, Head) else dataclasses.replace(op, out_scale=0.22)


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


def random_tensors(model: Model, rng: np.random.Generator) -> dict[str, F32]:
    """Every tensor that the operators name, float32 values that bf16 has, such that logits are around 1."""
    config, found = model.config, {}
    hidden, mlp, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    shapes = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    shapes |= {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "table": (config.vocab_size, hidden)}
    for op in model.operators:
        for field in dataclasses.fields(op):
            name = getattr(op, field.name)
            if field.name in shapes:
                shape = shapes[field.name]
                found[f"{name}.weight"] = rng.standard_normal(shape) / shape[1] ** 0.5
                if _has_bias(op, field.name):
                    found[f"{name}.bias"] = 0.3 * rng.standard_normal(shape[0])
            elif isinstance(name, str) and field.name.endswith("norm"):
                size = head if field.name in ("q_norm", "k_norm") else hidden
                found[f"{name}.weight"] = 1 - getattr(op, "norm_offset", 0.0) + 0.2 * rng.standard_normal(size)
    return {name: bf16_to_f32(f32_to_bf16(values.astype(np.float32))) for name, values in found.items()}


def _has_bias(op: Operator, matrix: str) -> bool:
    if isinstance(op, SelfAttention):
        return op.o_bias if matrix == "o" else op.qkv_bias
    return isinstance(op, Mlp) and op.bias


class TensorCheckpoint:
    """A `Checkpoint` of tensors in memory."""

    path: Path | None = None
    notes: tuple[str, ...] = ()
    fingerprint = "0" * 64

    def __init__(self, config: ModelConfig, tensors: dict[str, F32]) -> None:
        self.config, self._tensors = config, tensors

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, out: U16 | None = None) -> U16:
        block = f32_to_bf16(np.ascontiguousarray(self._tensors[name][rows or slice(None), cols or slice(None)]))
        if out is None:
            return block
        out[:] = block
        return out

    def read_vector(self, name: str) -> F32:
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def close(self) -> None:
        return
