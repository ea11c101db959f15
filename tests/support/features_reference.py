"""The logits of a model's operators, in torch and float64, rounded as the runtime rounds: written from their definitions, not
from csrc.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from support import reference
from torch import Tensor

from distmk.model.bf16 import F32
from distmk.model.nodes import Matrix
from distmk.model.operators import Embedding, Head, Mlp, Model, SelfAttention


@dataclass
class RoundedReference:
    """weights: float32, by their names. Rounded to bf16: weights with all that is folded into them, cached keys and values, and
    what is multiplied by a matrix.
    """

    model: Model
    weights: dict[str, F32]

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), vocab_size]"""
        x = torch.zeros(0)
        for op in self.model.operators:
            if isinstance(op, Embedding):
                x = rounded(self._weight(op.table) * op.scale)[torch.tensor(ids)]
            elif isinstance(op, SelfAttention):
                x = x + self._out(op, self._attention(op, x), op.o)
            elif isinstance(op, Mlp):
                x = x + self._out(op, self._mlp(op, x), op.down)
            else:
                x = self._head(op, x)
        return x

    def _weight(self, name: str) -> Tensor:
        return torch.from_numpy(self.weights[f"{name}.weight"]).double()

    def _over_rms(self, x: Tensor, norm: str | None) -> Tensor:
        return reference.over_rms(x, norm and self.model.config.rms_norm_eps)

    def _normed(self, x: Tensor, norm: str | None, offset: float) -> Tensor:
        return x if norm is None else self._over_rms(x, norm) * (self._weight(norm) + offset)

    def _linear(self, x: Tensor, matrix: Matrix, norm: str | None, offset: float) -> Tensor:
        """The product with x, which is over its rms, but without the norm's weight: that goes into the matrix."""
        weight = self._weight(matrix.tensor) * matrix.scale
        y = F.linear(x, rounded(weight if norm is None else weight * (self._weight(norm) + offset)))
        bias = f"{matrix.tensor}.bias"
        return y + matrix.scale * torch.from_numpy(self.weights[bias]).double() if matrix.bias else y

    def _out(self, op: SelfAttention | Mlp, x: Tensor, matrix: Matrix) -> Tensor:
        y = self._linear(rounded(x), matrix, None, 0.0)
        return self._normed(y, op.post_norm, op.norm_offset)

    def _mlp(self, op: Mlp, x: Tensor) -> Tensor:
        x = self._over_rms(rounded(x), op.norm)
        gate, up = (self._linear(x, matrix, op.norm, op.norm_offset) for matrix in (op.gate, op.up))
        return reference.ACTIVATIONS[op.activation](gate) * up

    def _attention(self, op: SelfAttention, x: Tensor) -> Tensor:
        config, x = self.model.config, self._over_rms(rounded(x), op.norm)
        table = reference.rope_table(len(x), config.head_dim, config.rope_theta)
        q, k, v = (
            self._linear(x, matrix, op.norm, op.norm_offset).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
            for matrix in (op.q, op.k, op.v)
        )  # [heads, tokens, head_dim]
        q, k = (
            reference.apply_rope(self._normed(part, norm, op.norm_offset), table)
            for part, norm in ((q, op.q_norm), (k, op.k_norm))
        )
        group, k, v = config.num_heads // config.num_kv_heads, rounded(k), rounded(v)
        how = reference.Scoring(op.window, op.scores)
        out = [
            torch.cat([reference.attention(q[h, t], k[h // group], v[h // group], t, how) for h in range(len(q))])
            for t in range(len(x))
        ]
        return torch.stack(out)

    def _head(self, op: Head, x: Tensor) -> Tensor:
        x = self._over_rms(rounded(x), op.norm)
        logits = self._linear(x, Matrix(op.table, 0, scale=op.scale), op.norm, op.norm_offset)
        return reference.softcap(logits, op.softcap)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()
