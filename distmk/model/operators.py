"""A model as the operators that tasks compute, in the order in which they run.

Compiler passes make them from `CausalLM.forward`.

The operators do not depend on ranks and workers. Norms and tables are checkpoint names without `.weight`. x is the
residual stream, [tokens, hidden_size]. `norm_offset` is added to the weights of an operator's norms. It is 1 if a
checkpoint stores a weight minus 1 (Gemma). Scales and offsets are folded into the weights when these are loaded, or
given to tasks (`DecodeOptions.folds_factors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distmk.abi import PLAIN_SCORES, Scores
from distmk.model.config import ModelConfig
from distmk.model.nodes import PLAIN_FORMAT, Matrix
from distmk.model.rope import ROPE


@dataclass(frozen=True)
class Embedding:
    """x = scale * table[token].

    format: the table's weight format, by name.
    """

    table: str
    scale: float = 1.0
    format: str = PLAIN_FORMAT


@dataclass(frozen=True)
class SelfAttention:
    """x += post_norm(o(attention(q, k, v of norm(x)))): column-parallel q, k and v, row-parallel o.

    norm, post_norm: RMSNorm over the rows of x, and over the rows that are added to x.
    q_norm, k_norm: RMSNorm over each head.
    All four norms are None if the model does not have them.
    rope: the rotary table (`distmk.model.rope`).
    window: positions that a query sees, its own included; None: all up to its own.
    scores: how scores are changed before the softmax.
    """

    layer: int
    norm: str | None
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_norm: str | None
    k_norm: str | None
    rope: str = ROPE
    post_norm: str | None = None
    norm_offset: float = 0.0
    window: int | None = None
    scores: Scores = PLAIN_SCORES

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Mlp:
    """x += post_norm(down(activation(gate(norm(x))) * up(norm(x)))): column-parallel gate and up, row-parallel down.

    `norm`, `post_norm`: see `SelfAttention`.
    """

    layer: int
    norm: str | None
    gate: Matrix
    up: Matrix
    down: Matrix
    activation: str = "silu"
    post_norm: str | None = None
    norm_offset: float = 0.0

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Head:
    """Greedy next token of sampled rows: argmax of the logits, scale * table @ norm(x). The table is vocabulary-parallel.

    softcap: sampling and reports use softcap * tanh(logits / softcap) instead of the logits; None: the logits
    themselves.
    format: the table's weight format, by name.
    """

    norm: str
    table: str
    norm_offset: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    format: str = PLAIN_FORMAT


Operator = Embedding | SelfAttention | Mlp | Head


def with_formats(operators: tuple[Operator, ...], formats: Mapping[str, str]) -> tuple[Operator, ...]:
    """The operators with the weight formats of `formats`: names of formats by names of matrices, without `.weight`.

    One task multiplies rows of gate and of up, so both are bf16 if their formats differ.
    """
    return tuple(_with_formats(op, formats) for op in operators)


def _with_formats(op: Operator, formats: Mapping[str, str]) -> Operator:
    if isinstance(op, Embedding | Head):
        return replace(op, format=formats.get(op.table, op.format))
    changed: dict[str, Any] = {
        name: replace(value, format=formats.get(value.tensor, value.format))
        for name, value in vars(op).items()
        if isinstance(value, Matrix)
    }
    if isinstance(op, Mlp) and changed["gate"].format != changed["up"].format:
        changed |= {name: replace(changed[name], format=PLAIN_FORMAT) for name in ("gate", "up")}
    return replace(op, **changed)


@dataclass(frozen=True)
class Model:
    """A decoder: its configuration, and its operators in the order in which they run."""

    config: ModelConfig
    operators: tuple[Operator, ...]

    @property
    def rope_tables(self) -> tuple[str, ...]:
        """The rotary tables of attention, in the order of their first use."""
        return tuple(dict.fromkeys(op.rope for op in self.operators if isinstance(op, SelfAttention)))

    @property
    def matrix_formats(self) -> Iterator[tuple[str, str]]:
        """The tensor of every matrix, without `.weight`, and the name of its weight format."""
        for op in self.operators:
            if isinstance(op, Embedding | Head):
                yield op.table, op.format
            else:
                yield from ((value.tensor, value.format) for value in vars(op).values() if isinstance(value, Matrix))

    @property
    def has_post_norms(self) -> bool:
        """Whether some operator normalizes its output before adding it to x."""
        return any(isinstance(op, SelfAttention | Mlp) and op.post_norm is not None for op in self.operators)
