"""The operators that models are written in, as in torch: functions of symbolic tensors [tokens, columns].

A name is that of a checkpoint's tensor, without `.weight` or `.bias`. The layout over ranks is an annotation of `linear`; sums
over ranks follow from it. Wrong sizes raise UsageError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distmk.errors import UsageError
from distmk.model.nodes import (
    Activation,
    Attention,
    Embedding,
    HeadNorm,
    Linear,
    Matrix,
    Node,
    Norm,
    Parallel,
    RmsNorm,
    Rope,
    Slice,
    Softcap,
)

__all__ = ["attention", "embedding", "gelu_tanh", "head_norm", "linear", "rms_norm", "rope", "silu", "softcap", "split"]


def embedding(tokens: Node, name: str, num_tokens: int, num_features: int) -> Node:
    """table[token]: [tokens, num_features]. The table, [num_tokens, num_features], is dealt to ranks by tokens."""
    return Embedding(num_features, tokens, name, num_tokens)


def rms_norm(x: Node, name: str, eps: float, *, offset: float = 0.0) -> Node:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), weight: [columns] (arXiv:1910.07467)."""
    return RmsNorm(x.cols, x, Norm(name, eps, offset))


def head_norm(x: Node, name: str, eps: float, head_dim: int, *, offset: float = 0.0) -> Node:
    """The same of every head by itself, weight: [head_dim], as Qwen3 normalizes queries and keys."""
    return HeadNorm(x.cols, _in_heads(x, head_dim), Norm(name, eps, offset), head_dim)


def linear(x: Node, name: str, num_features: int, *, bias: bool = False, parallel: Parallel = "column") -> Node:
    """x @ weight.T + bias: [tokens, num_features], weight: [num_features, columns of x].

    parallel: "column": each rank has some of the features. "row": each rank has some columns of x, and products are summed over
    ranks (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).
    """
    if parallel not in ("column", "row"):
        raise UsageError(f"{name}: parallel is {parallel!r}; expected column or row")
    matrix = Matrix(name, num_features, stored_rows=num_features, bias=bias)
    return Linear(num_features, x, (matrix,), parallel)


def split(x: Node, sizes: Sequence[int]) -> list[Node]:
    """Consecutive columns of x, as many as `sizes` say."""
    if sum(sizes) != x.cols:
        raise UsageError(f"split of {x.cols} columns into {list(sizes)}, which are {sum(sizes)}")
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Slice(size, x, begin) for size, begin in zip(sizes, begins, strict=True)]


def rope(x: Node, head_dim: int, table: str = "rope") -> Node:
    """Rotary embedding of every head, halves of its first elements as pairs (arXiv:2104.09864). table: one of the config's, which
    says how many elements rotate (`rotary_dim`).
    """
    return Rope(x.cols, _in_heads(x, head_dim), head_dim, table)


def attention(
    q: Node,
    k: Node,
    v: Node,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Node:
    """Causal attention over the paged KV cache, to which it appends k and v: [tokens, columns of q].

    A KV head serves as many query heads as there are more of them (arXiv:2305.13245). window: positions that a query sees, its
    own included. softcap: scores become cap * tanh(score / cap). scale: of scores; None: head_dim ** -0.5.
    """
    for part in (q, k, v):
        _in_heads(part, head_dim)
    if k.cols != v.cols or q.cols % k.cols:
        raise UsageError(
            f"attention of {q.cols} columns of q, {k.cols} of k and {v.cols} of v; k and v need equal divisors of q"
        )
    return Attention(q.cols, q, k, v, head_dim, window, softcap, scale)


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    return Activation(x.cols, x, "silu")


def gelu_tanh(x: Node) -> Node:
    """GELU by its approximation with tanh (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return Activation(x.cols, x, "gelu_tanh")


def softcap(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap)."""
    if not 0 < cap < math.inf:
        raise UsageError(f"softcap of {cap}; a positive number was expected")
    return Softcap(x.cols, x, cap)


def _in_heads(x: Node, head_dim: int) -> Node:
    if head_dim < 1 or x.cols % head_dim:
        raise UsageError(f"{x.kind} of {x.cols} columns is not of whole heads of {head_dim}")
    return x
