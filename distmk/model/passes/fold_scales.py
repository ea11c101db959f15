"""Folds a constant factor of a product or of an embedding into its weights, which are scaled when they are packed."""

from __future__ import annotations

from dataclasses import replace

from distmk.model.nodes import Embedding, Linear, Node, Scale, rewrite


def fold_scales(output: Node) -> Node:
    """Scale(Linear) and Scale(Embedding) -> Linear and Embedding with scaled weights."""

    def rule(node: Node) -> Node:
        if not isinstance(node, Scale):
            return node
        x = node.x
        if isinstance(x, Embedding):
            return replace(x, scale=x.scale * node.factor)
        if isinstance(x, Linear):
            return replace(x, matrices=tuple(replace(m, scale=m.scale * node.factor) for m in x.matrices))
        return node

    return rewrite(output, rule)
