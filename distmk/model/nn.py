"""The operators that models are written in, as in torch: functions of symbolic tensors [tokens, columns].

A name is the name of a checkpoint's tensor, without `.weight` or `.bias`. The layout over ranks is an annotation of
`linear`; sums over ranks follow from it. UsageError: a size does not fit, or a value does not have the type that its
annotation says.
"""

from __future__ import annotations

from collections.abc import Sequence

from distmk.abi import PLAIN_SCORES, Epilogue, Scores
from distmk.errors import UsageError, shown
from distmk.model.nodes import (
    FINITE,
    PLAIN_FORMAT,
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
from distmk.model.rope import LOCAL_ROPE, ROPE
from distmk.parameter_checks import flag, real, text, whole

__all__ = ["attention", "embedding", "gelu_tanh", "head_norm", "linear", "rms_norm", "rope", "silu", "softcap", "split"]

MOST_COLS = (1 << 31) - 1


def embedding(tokens: Node, name: str, num_tokens: int, num_features: int, *, format: str = PLAIN_FORMAT) -> Node:
    """table[token]: [tokens, num_features]. The table, [num_tokens, num_features], is divided among ranks by tokens.

    format: see `linear`.
    """
    tokens, name = _tensor("embedding", tokens), _name("embedding", name)
    return Embedding(
        _size(name, num_features), tokens, name, _size(name, num_tokens), format=text(f"format of {name}", format)
    )


def rms_norm(x: Node, name: str, eps: float, *, offset: float = 0.0) -> Node:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), weight: [columns] (arXiv:1910.07467)."""
    return RmsNorm(_tensor("rms_norm", x).cols, x, _norm("rms_norm", name, eps, offset))


def head_norm(x: Node, name: str, eps: float, head_dim: int, *, offset: float = 0.0) -> Node:
    """RMSNorm of every head by itself, weight: [head_dim], as Qwen3 normalizes queries and keys."""
    head_dim = _heads("head_norm", x, head_dim)
    return HeadNorm(x.cols, x, _norm("head_norm", name, eps, offset), head_dim)


def linear(
    x: Node,
    name: str,
    num_features: int,
    *,
    bias: bool = False,
    parallel: Parallel = "column",
    format: str = PLAIN_FORMAT,
) -> Node:
    """x @ weight.T + bias: [tokens, num_features], weight: [num_features, columns of x].

    format: the weight format in memory (`distmk.formats`), such as "int4". bfloat16 weights are quantized to it when
    they are loaded.

    parallel: "column": each rank has some of the features. "row": each rank has some of the columns of x, and the
    products are summed over ranks (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).
    """
    x, name = _tensor("linear", x), _name("linear", name)
    num_features = _size(name, num_features)
    if parallel not in ("column", "row"):
        raise UsageError(f"{name}: parallel is {shown(parallel)}; expected 'column' or 'row'")
    has_bias, format = flag(f"bias of {name}", bias), text(f"format of {name}", format)
    matrix = Matrix(name, num_features, stored_rows=num_features, bias=has_bias, format=format)
    return Linear(num_features, x, (matrix,), parallel)


def split(x: Node, sizes: Sequence[int]) -> list[Node]:
    """Consecutive columns of x. `sizes`: how many columns each part gets."""
    x = _tensor("split", x)
    if not isinstance(sizes, Sequence):
        raise UsageError(f"split into {shown(sizes)}; expected a list of sizes")
    sizes = [_size("split", size) for size in sizes]
    if sum(sizes) != x.cols:
        raise UsageError(f"split of {x.cols} columns into {shown(sizes)}, which are {sum(sizes)}")
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Slice(size, x, begin) for size, begin in zip(sizes, begins, strict=True)]


def rope(x: Node, head_dim: int, table: str = ROPE) -> Node:
    """Rotary embedding of every head (arXiv:2104.09864). The two halves of the rotating elements form the pairs.

    table: one of the config's tables. The config says how many elements rotate (`rotary_dim`).
    """
    if table not in (ROPE, LOCAL_ROPE):
        raise UsageError(f"rope by the table {shown(table)}; expected {ROPE!r}, or {LOCAL_ROPE!r} of local_rope_theta")
    head_dim = _heads("rope", x, head_dim)
    return Rope(x.cols, x, head_dim, table)


def attention(
    q: Node,
    k: Node,
    v: Node,
    head_dim: int,
    *,
    window: int | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Node:
    """Causal attention over the paged KV cache, to which it appends k and v: [tokens, columns of q].

    If there are more query heads than KV heads, each KV head serves an equal number of query heads (arXiv:2305.13245).
    window: positions that a query sees, its own included. scores: how scores are changed before the softmax.
    """
    for part in (q, k, v):
        head_dim = _heads("attention", part, head_dim)
    if window is not None:
        window = _size("window of attention", window)
    if not isinstance(scores, Scores) or (fault := scores.find_fault()):
        raise UsageError(
            fault if isinstance(scores, Scores) else f"the scores of attention are {shown(scores)}; expected Scores"
        )
    if k.cols != v.cols or q.cols % k.cols:
        raise UsageError(
            f"attention of {q.cols} columns of q, {k.cols} of k and {v.cols} of v; k and v need equal divisors of q"
        )
    return Attention(q.cols, q, k, v, head_dim, window, scores)


ACTIVATIONS = {"silu": Epilogue.SWIGLU, "gelu_tanh": Epilogue.GEGLU}
"""The activations of gated products by name, and the epilogue that computes each (csrc/runtime/pointwise.h)."""


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    return Activation(_tensor("silu", x).cols, x, "silu")


def gelu_tanh(x: Node) -> Node:
    """GELU by its approximation with tanh (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return Activation(_tensor("gelu_tanh", x).cols, x, "gelu_tanh")


def softcap(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap)."""
    return Softcap(_tensor("softcap", x).cols, x, _positive("cap of softcap", cap))


def _tensor(operator: str, x: object) -> Node:
    if not isinstance(x, Node):
        raise UsageError(f"{operator} of {shown(x)}; expected tokens, or what another operator returned")
    return x


def _name(operator: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a {operator} is {shown(name)}; expected a checkpoint's, without .weight")
    return name


def _norm(operator: str, name: object, eps: object, offset: object) -> Norm:
    name = _name(operator, name)
    return Norm(name, _positive(f"eps of {name}", eps), real(f"offset of {name}", offset, *FINITE, "a number"))


def _size(what: str, size: object) -> int:
    return whole(f"a size of {what}", size, 1, MOST_COLS, "a whole number from 1")


def _positive(what: str, number: object) -> float:
    return real(what, number, 0, FINITE[1], "a positive number", above=True)


def _heads(operator: str, x: object, head_dim: object) -> int:
    """Elements of a head. UsageError: the columns of x are not a whole number of heads."""
    x, head_dim = _tensor(operator, x), _size(operator, head_dim)
    if x.cols % head_dim:
        raise UsageError(f"{operator} of {x.cols} columns, which are no whole number of heads of {head_dim}")
    return head_dim
