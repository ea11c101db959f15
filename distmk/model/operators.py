"""A model as the operators that tasks compute, in the order in which they run: what compiler passes make of `CausalLM.forward`.

Independent of ranks and workers. Norms and tables are checkpoint names without `.weight`. x is the residual stream, [tokens,
hidden_size].
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.model.config import ModelConfig
from distmk.model.nodes import Matrix
from distmk.model.rope import ROPE


@dataclass(frozen=True)
class Embedding:
    """x = table[token]."""

    table: str


@dataclass(frozen=True)
class SelfAttention:
    """x += o(attention(q, k, v of norm(x))): column-parallel q, k and v, row-parallel o.

    `q_norm`, `k_norm`: RMSNorm over each head, None in a model without it. `rope`: the rotary table (`distmk.model.rope`).
    """

    layer: int
    norm: str
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_norm: str | None
    k_norm: str | None
    rope: str = ROPE

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Mlp:
    """x += down(silu(gate(norm(x))) * up(norm(x))): column-parallel gate and up, row-parallel down."""

    layer: int
    norm: str
    gate: Matrix
    up: Matrix
    down: Matrix

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Head:
    """Greedy next token of sampled rows: argmax of the vocabulary-parallel head over norm(x)."""

    norm: str
    table: str


Operator = Embedding | SelfAttention | Mlp | Head


@dataclass(frozen=True)
class Model:
    """A decoder: its configuration, and its operators in the order in which they run."""

    config: ModelConfig
    operators: tuple[Operator, ...]
