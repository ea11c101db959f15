"""Where ranks compute terms of a sum, an all-reduce: behind row-parallel products, and behind the embedding, of which a rank
without the token has zeros (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).
"""

from __future__ import annotations

from distmk.model.nodes import Embedding, Linear, Node, Sum, rewrite


def place_sums(output: Node) -> Node:
    """Linear, row-parallel -> Sum(Linear); Embedding -> Sum(Embedding)."""

    def rule(node: Node) -> Node:
        is_term = isinstance(node, Embedding) or (isinstance(node, Linear) and node.parallel == "row")
        return Sum(node.cols, node) if is_term else node

    return rewrite(output, rule)
