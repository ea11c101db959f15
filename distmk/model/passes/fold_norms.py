"""Folds an RMSNorm into the product that follows it.

The norm's weight scales the matrix' columns when they are packed. The division by the root mean square commutes with
the product and is left to the product's epilogue.
"""

from __future__ import annotations

from dataclasses import replace

from distmk.model.nodes import Linear, Node, RmsNorm, rewrite


def fold_norms(output: Node) -> Node:
    """Linear(RmsNorm(x)) -> Linear(x, norm)."""

    def rule(node: Node) -> Node:
        if isinstance(node, Linear) and isinstance(node.x, RmsNorm) and node.norm is None:
            return replace(node, x=node.x.x, norm=node.x.norm)
        return node

    return rewrite(output, rule)
