"""Symbolic operators evaluated in torch and float64, plain and fused ones alike: what compiler passes must not change."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.reference import ACTIVATIONS, Scoring, apply_rope, rope_table
from torch import Tensor

from distmk.model import nodes
from distmk.model.nodes import Matrix, Node, Norm, in_order

Weights = dict[str, Tensor]


def evaluate(output: Node, weights: Weights, ids: Tensor) -> Tensor:
    """float64 [tokens, cols] of one sequence of token ids."""
    made: dict[int, Tensor] = {}
    for node in in_order(output):
        made[id(node)] = _evaluate(node, made, weights, ids)
    return made[id(output)]


def _evaluate(node: Node, made: dict[int, Tensor], weights: Weights, ids: Tensor) -> Tensor:
    inputs = [made[id(value)] for value in node.inputs]
    if isinstance(node, nodes.Tokens):
        return ids
    if isinstance(node, nodes.Embedding):
        return weights[f"{node.table}.weight"][inputs[0]] * node.scale
    if isinstance(node, nodes.RmsNorm):
        return _norm(inputs[0], node.norm, weights)
    if isinstance(node, nodes.HeadNorm):
        return _norm_heads(inputs[0], node.norm, node.head_dim, weights)
    if isinstance(node, nodes.Linear):
        x = _norm(inputs[0], node.norm, weights) if node.norm else inputs[0]
        return torch.cat([_product(x, matrix, weights) for matrix in node.matrices], dim=-1)
    if isinstance(node, nodes.Slice):
        return inputs[0][:, node.begin : node.begin + node.cols]
    if isinstance(node, nodes.Rope):
        return _rotated(inputs[0], node.head_dim)
    if isinstance(node, nodes.Attention):
        return _attention(*inputs, node)
    if isinstance(node, nodes.FusedAttention):
        q, k, v = inputs[0].split([matrix.num_rows for matrix in node.qkv.matrices], dim=-1)
        q = _norm_heads(q, node.q_norm, node.head_dim, weights) if node.q_norm else q
        k = _norm_heads(k, node.k_norm, node.head_dim, weights) if node.k_norm else k
        q, k = (_rotated(part, node.head_dim) if node.rope else part for part in (q, k))
        return _attention(q, k, v, node)
    if isinstance(node, nodes.Activation):
        return ACTIVATIONS[node.function](inputs[0])
    if isinstance(node, nodes.Gated):
        gate, up = inputs[0].chunk(2, dim=-1)
        return ACTIVATIONS[node.function](gate) * up
    if isinstance(node, nodes.Multiply):
        return inputs[0] * inputs[1]
    if isinstance(node, nodes.Scale):
        return inputs[0] * node.factor
    if isinstance(node, nodes.Softcap):
        return node.cap * torch.tanh(inputs[0] / node.cap)
    if isinstance(node, nodes.Sum):
        return inputs[0]
    if isinstance(node, nodes.Residual):
        return inputs[0] + (_norm(inputs[1], node.post_norm, weights) if node.post_norm else inputs[1])
    assert isinstance(node, nodes.Add), node.kind
    return inputs[0] + inputs[1]


def _norm(x: Tensor, norm: Norm, weights: Weights) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.offset + weights[f"{norm.weight}.weight"], norm.eps)


def _norm_heads(x: Tensor, norm: Norm, head_dim: int, weights: Weights) -> Tensor:
    return _norm(x.unflatten(-1, (-1, head_dim)), norm, weights).flatten(-2)


def _product(x: Tensor, matrix: Matrix, weights: Weights) -> Tensor:
    rows = slice(matrix.first_row, matrix.first_row + matrix.num_rows)
    bias = weights[f"{matrix.tensor}.bias"][rows] if matrix.bias else None
    return F.linear(x, weights[f"{matrix.tensor}.weight"][rows], bias) * matrix.scale


def _rotated(x: Tensor, head_dim: int) -> Tensor:
    return apply_rope(x.unflatten(-1, (-1, head_dim)), rope_table(len(x), head_dim)[:, None]).flatten(-2)


def _attention(q: Tensor, k: Tensor, v: Tensor, node: Any) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, node.head_dim)).transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
    scores = Scoring(node.window, node.scores).score(q, k)
    behind = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[1])
    hidden = (behind < 0) | (behind >= (node.window or len(behind)))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
