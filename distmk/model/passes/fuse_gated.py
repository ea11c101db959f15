"""Fuses gate and up into one product, whose epilogue applies the activation (GLU variants: Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

from distmk.model.nodes import Activation, Gated, Linear, Multiply, Node, rewrite


def fuse_gated(output: Node) -> Node:
    """Multiply(Activation(gate), up), in either order, of products of one tensor -> Gated of one product."""

    def rule(node: Node) -> Node:
        if not isinstance(node, Multiply):
            return node
        active, up = (node.x, node.y) if isinstance(node.x, Activation) else (node.y, node.x)
        if not (isinstance(active, Activation) and isinstance(active.x, Linear) and isinstance(up, Linear)):
            return node
        gate = active.x
        if gate.x is not up.x or gate.norm != up.norm or (gate.parallel, up.parallel) != ("column", "column"):
            return node
        gate_up = Linear(gate.cols + up.cols, gate.x, gate.matrices + up.matrices, "column", gate.norm)
        return Gated(node.cols, gate_up, active.function)

    return rewrite(output, rule)
