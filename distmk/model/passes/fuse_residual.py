"""Fuses an addition to the residual stream with the sum over ranks before it, and with a post-norm between the two."""

from __future__ import annotations

from distmk.model.nodes import Add, Embedding, Linear, Node, Residual, RmsNorm, Sum, rewrite


def fuse_residual(output: Node) -> Node:
    """Add(x, Sum) and Add(x, RmsNorm(Sum)), in either order -> Residual."""

    def rule(node: Node) -> Node:
        if not isinstance(node, Add):
            return node
        for x, term in ((node.x, node.y), (node.y, node.x)):
            norm, term = (term.norm, term.x) if isinstance(term, RmsNorm) else (None, term)
            if isinstance(term, Sum) and isinstance(term.x, Linear) and _is_stream(x):
                return Residual(node.cols, x, term, norm)
        return node

    return rewrite(output, rule)


def _is_stream(x: Node) -> bool:
    """Whether x is the residual stream: the embedding and the terms added to it."""
    return isinstance(x, Residual) or (isinstance(x, Sum) and isinstance(x.x, Embedding))
