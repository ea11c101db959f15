"""Symbolic tensors of a model, each the operator that computes it.

`CausalLM.forward` builds them; compiler passes rewrite them.

A tensor is [tokens, cols]. Plain operators come from `distmk.model.nn`; `Sum`, `Residual`, `FusedAttention` and `Gated`
come from passes. Fields named after a weight contain the checkpoint's name without `.weight` or `.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from distmk.abi import PLAIN_SCORES, Scores
from distmk.errors import UsageError, shown
from distmk.parameter_checks import real

Parallel = Literal["column", "row"]
"""How a matrix is divided among ranks: by its outputs ("column"), or by its inputs ("row"), so that its products are
terms of a sum over ranks.
"""


PLAIN_FORMAT = "bf16"  # of matrices that say no other (`distmk.formats`)
FINITE = (-1e30, 1e30)  # the range of numbers that float32 can represent together with their products


@dataclass(frozen=True)
class Matrix:
    """Rows [first_row, first_row + num_rows) of a checkpoint's matrix of `stored_rows` rows; they and the bias times
    `scale`.

    format: the name of the weight format that memory has it in (`distmk.formats`).
    """

    tensor: str
    num_rows: int
    first_row: int = 0
    stored_rows: int = 0
    bias: bool = False
    scale: float = 1.0
    format: str = PLAIN_FORMAT


@dataclass(frozen=True)
class Norm:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    weight: str
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor of `cols` columns. Nodes are equal only if they are the same object, because each is one computation.

    Arithmetic with anything but tensors and numbers raises UsageError.
    """

    __array_ufunc__: ClassVar[None] = None  # numpy's numbers and arrays leave arithmetic to this class

    cols: int

    def __init_subclass__(cls) -> None:
        """A dataclass repr would print all inputs of inputs. They share so many nodes that the text would be endless."""
        cls.__repr__ = Node.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return self.describe()

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Node))

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __add__(self, other: Node) -> Node:
        return Add(_common_cols("+", self, other), self, other)

    def __mul__(self, other: Node | float) -> Node:
        if isinstance(other, Node):
            return Multiply(_common_cols("*", self, other), self, other)
        expected = f"a finite number, or a tensor of {self.cols} columns"
        return Scale(self.cols, self, real(f"a factor of {self.kind}", other, *FINITE, expected))

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def tensors(self) -> list[str]:
        """The checkpoint names of this node's own weights."""
        values = [part for value in vars(self).values() for part in (value if isinstance(value, tuple) else (value,))]
        return [v.tensor if isinstance(v, Matrix) else v.weight for v in values if isinstance(v, Matrix | Norm)]

    def describe(self, inputs: str = "") -> str:
        """One line: the operator with its inputs and the attributes that differ from their defaults."""
        attributes = [(field, getattr(self, field.name)) for field in fields(self) if field.name != "cols"]
        parts = [
            f"{field.name}={_shown(value)}"
            for field, value in attributes
            if not isinstance(value, Node) and value is not None and value != field.default
        ]
        return f"{self.kind}({', '.join([inputs] * bool(inputs) + parts)}) -> {self.cols}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " | ".join(map(_shown, value))
    if isinstance(value, Matrix):
        part = f"[{value.first_row}:+{value.num_rows}]" if value.num_rows != value.stored_rows else ""
        form = f" in {value.format}" if value.format != PLAIN_FORMAT else ""
        scale = f" * {value.scale:g}" if value.scale != 1 else ""
        return value.tensor + part + form + " with bias" * value.bias + scale
    return value.weight if isinstance(value, Norm) else str(value)


def _common_cols(sign: str, left: Node, right: Node) -> int:
    if not isinstance(right, Node) or left.cols != right.cols:
        cols = right.cols if isinstance(right, Node) else shown(right)
        raise UsageError(
            f"{left.kind} of {left.cols} columns {sign} {cols}; two tensors of as many columns were expected"
        )
    return left.cols


@dataclass(frozen=True, eq=False)
class Tokens(Node):
    """The token ids of an iteration's rows."""


@dataclass(frozen=True, eq=False)
class Embedding(Node):
    """table[token] * scale. The table is divided among ranks by tokens."""

    tokens: Node
    table: str
    num_tokens: int
    scale: float = 1.0
    format: str = PLAIN_FORMAT


@dataclass(frozen=True, eq=False)
class RmsNorm(Node):
    x: Node
    norm: Norm


@dataclass(frozen=True, eq=False)
class HeadNorm(Node):
    """`Norm` of each head of `head_dim` columns."""

    x: Node
    norm: Norm
    head_dim: int


@dataclass(frozen=True, eq=False)
class Linear(Node):
    """norm(x) @ matrix.T + bias, for several matrices side by side. norm: None until `fold_norms`."""

    x: Node
    matrices: tuple[Matrix, ...]
    parallel: Parallel
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Slice(Node):
    """Columns [begin, begin + cols)."""

    x: Node
    begin: int


@dataclass(frozen=True, eq=False)
class Rope(Node):
    """Rotary embedding of each head's first `rotary_dim` elements (Su et al., arXiv:2104.09864), with a table of the config."""

    x: Node
    head_dim: int
    table: str


@dataclass(frozen=True, eq=False)
class Attention(Node):
    """softmax(scores of q k^T) v over the KV cache: causal, grouped queries (Ainslie et al., arXiv:2305.13245).

    window: how many positions a query sees, its own included.
    """

    q: Node
    k: Node
    v: Node
    head_dim: int
    window: int | None = None
    scores: Scores = PLAIN_SCORES


@dataclass(frozen=True, eq=False)
class Activation(Node):
    x: Node
    function: str


@dataclass(frozen=True, eq=False)
class Multiply(Node):
    x: Node
    y: Node


@dataclass(frozen=True, eq=False)
class Scale(Node):
    x: Node
    factor: float


@dataclass(frozen=True, eq=False)
class Add(Node):
    x: Node
    y: Node


@dataclass(frozen=True, eq=False)
class Softcap(Node):
    """cap * tanh(x / cap)."""

    x: Node
    cap: float


@dataclass(frozen=True, eq=False)
class FusedAttention(Node):
    """`Attention` of the queries, keys and values in `qkv`.

    It normalizes them by head, rotates them and appends keys and values.
    """

    qkv: Linear
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    rope: str | None
    window: int | None = None
    scores: Scores = PLAIN_SCORES


@dataclass(frozen=True, eq=False)
class Gated(Node):
    """activation(gate) * up, in the epilogue of one product with the columns of gate and then up."""

    gate_up: Linear
    function: str


@dataclass(frozen=True, eq=False)
class Sum(Node):
    """The sum of x over ranks: an all-reduce."""

    x: Node


@dataclass(frozen=True, eq=False)
class Residual(Node):
    """x + post_norm(sum), added where the sum is reduced."""

    x: Node
    sum: Sum
    post_norm: Norm | None = None


def in_order(output: Node) -> list[Node]:
    """`output` and all nodes that it depends on, each after its inputs."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, Iterator[Node]]] = [(output, iter(output.inputs))]
    seen.add(id(output))
    while stack:
        node, inputs = stack[-1]
        for value in inputs:
            if id(value) not in seen:
                seen.add(id(value))
                stack.append((value, iter(value.inputs)))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def rewrite(output: Node, rule: Callable[[Node], Node]) -> Node:
    """`output` with every node replaced by the result of `rule`, after its inputs have been rewritten.

    `rule` may return the node itself.
    """
    made: dict[int, Node] = {}
    for node in in_order(output):
        changed: dict[str, Any] = {
            name: made[id(value)]
            for name, value in vars(node).items()
            if isinstance(value, Node) and made[id(value)] is not value
        }
        made[id(node)] = rule(replace(node, **changed) if changed else node)
    return made[id(output)]
