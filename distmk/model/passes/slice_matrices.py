"""Turns columns of a product into rows of its matrix: a checkpoint that stores q, k and v as one matrix is read as three."""

from __future__ import annotations

from dataclasses import replace

from distmk.model.nodes import Linear, Node, Slice, rewrite


def slice_matrices(output: Node) -> Node:
    """Slice(Linear(x)) -> Linear(x) with a range of rows."""

    def rule(node: Node) -> Node:
        if not (isinstance(node, Slice) and isinstance(node.x, Linear) and len(node.x.matrices) == 1):
            return node
        (matrix,) = node.x.matrices
        rows = replace(matrix, first_row=matrix.first_row + node.begin, num_rows=node.cols)
        return replace(node.x, cols=node.cols, matrices=(rows,))

    return rewrite(output, rule)
