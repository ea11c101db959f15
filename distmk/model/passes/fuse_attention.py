"""Fuses queries, keys and values into one product, and their norms and rotation into attention."""

from __future__ import annotations

from typing import NamedTuple

from distmk.model.nodes import Attention, FusedAttention, HeadNorm, Linear, Node, Norm, Rope, rewrite


class _Projected(NamedTuple):
    """A product, the norm of its heads, and the table by which they are rotated."""

    linear: Linear
    norm: Norm | None
    rope: str | None


def fuse_attention(output: Node) -> Node:
    """Attention(rope(norm(q)), rope(norm(k)), v) of products of one tensor -> FusedAttention of one product."""

    def rule(node: Node) -> Node:
        if not isinstance(node, Attention):
            return node
        q, k, v = (_projected(part, node.head_dim) for part in (node.q, node.k, node.v))
        if not (q and k and v) or v.norm or v.rope or q.rope != k.rope or not _may_join(q.linear, k.linear, v.linear):
            return node
        matrices = q.linear.matrices + k.linear.matrices + v.linear.matrices
        cols = q.linear.cols + k.linear.cols + v.linear.cols
        qkv = Linear(cols, q.linear.x, matrices, "column", q.linear.norm)
        return FusedAttention(node.cols, qkv, node.head_dim, q.norm, k.norm, q.rope, node.window, node.scores)

    return rewrite(output, rule)


def _projected(node: Node, head_dim: int) -> _Projected | None:
    """The product that attention reads, with its norm and rotation; None: another operator lies in between."""
    table = norm = None
    if isinstance(node, Rope) and node.head_dim == head_dim:
        table, node = node.table, node.x
    if isinstance(node, HeadNorm) and node.head_dim == head_dim:
        norm, node = node.norm, node.x
    return _Projected(node, norm, table) if isinstance(node, Linear) else None


def _may_join(*products: Linear) -> bool:
    first = products[0]
    return all(p.x is first.x and p.norm == first.norm and p.parallel == "column" for p in products)
