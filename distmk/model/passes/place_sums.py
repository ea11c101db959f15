"""Inserts an all-reduce where each rank computes a term of a sum: after row-parallel products and after the embedding.

A rank that does not have a token's row of the embedding contributes zeros (Shoeybi et al., "Megatron-LM",
arXiv:1909.08053).
"""

from __future__ import annotations

from distmk.model.nodes import Embedding, Linear, Node, Sum, rewrite


def place_sums(output: Node) -> Node:
    """Linear, row-parallel -> Sum(Linear); Embedding -> Sum(Embedding)."""

    def rule(node: Node) -> Node:
        is_term = isinstance(node, Embedding) or (isinstance(node, Linear) and node.parallel == "row")
        return Sum(node.cols, node) if is_term else node

    return rewrite(output, rule)
