"""The logits of a list of operators, in torch and float64: written from the definitions of the models, not from csrc."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from support import reference
from torch import Tensor

from distmk.model.operators import Embedding, Head, Mlp, Model, SelfAttention
from distmk.weights.bf16 import F32


@dataclass
class FeaturesReference:
    """tensors: float32, by their names. rounded: round to bf16 what the runtime rounds: the weights with all that is folded
    into them, cached keys and values, and what is multiplied by a matrix.
    """

    model: Model
    tensors: dict[str, F32]
    rounded: bool = False

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), vocab_size]"""
        x = torch.zeros(0)
        for op in self.model.operators:
            if isinstance(op, Embedding):
                x = self._round(self._tensor(f"{op.table}.weight") * op.scale)[torch.tensor(ids)]
            elif isinstance(op, SelfAttention):
                x = x + self._out(op, self._attention(op, x), op.o, op.o_bias)
            elif isinstance(op, Mlp):
                x = x + self._out(op, self._mlp(op, x), op.down, op.bias)
            else:
                return self._head(op, x)
        raise AssertionError("no head")

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.tensors[name]).double()

    def _round(self, x: Tensor) -> Tensor:
        return x.bfloat16().double() if self.rounded else x

    def _rms_norm(self, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * weight

    def _linear(self, x: Tensor, matrix: str, norm: str | None, offset: float, scale: float = 1.0) -> Tensor:
        """The matrix times x, which has no norm's weight yet: it goes into the matrix."""
        weight = self._tensor(f"{matrix}.weight") * scale
        if norm is not None:
            weight = weight * (self._tensor(f"{norm}.weight") + offset)
        return F.linear(x, self._round(weight))

    def _input(self, x: Tensor, norm: str | None) -> Tensor:
        return self._round(x) if norm is None else self._rms_norm(self._round(x))

    def _bias(self, matrix: str, is_there: bool) -> Tensor | float:
        return self._tensor(f"{matrix}.bias") if is_there else 0.0

    def _out(self, op: SelfAttention | Mlp, x: Tensor, matrix: str, has_bias: bool) -> Tensor:
        y = self._linear(self._round(x), matrix, None, 0.0, op.out_scale) + op.out_scale * self._bias(matrix, has_bias)
        if op.post_norm is None:
            return y
        return self._rms_norm(y, self._tensor(f"{op.post_norm}.weight") + op.norm_offset)

    def _mlp(self, op: Mlp, x: Tensor) -> Tensor:
        x = self._input(x, op.norm)
        gate, up = (
            self._linear(x, matrix, op.norm, op.norm_offset) + self._bias(matrix, op.bias)
            for matrix in (op.gate, op.up)
        )
        return (F.silu(gate) if op.activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def _attention(self, op: SelfAttention, x: Tensor) -> Tensor:
        config, x = self.model.config, self._input(x, op.norm)
        table = reference.rope_table(len(x), config.head_dim, config.rope_theta)
        heads = []
        for matrix, norm in ((op.q, op.q_norm), (op.k, op.k_norm), (op.v, None)):
            y = self._linear(x, matrix, op.norm, op.norm_offset) + self._bias(matrix, op.qkv_bias)
            y = y.reshape(len(x), -1, config.head_dim).transpose(0, 1)  # [heads, tokens, head_dim]
            if norm is not None:
                y = self._rms_norm(y, self._tensor(f"{norm}.weight") + op.norm_offset)
            heads.append(y if matrix == op.v else reference.apply_rope(y, table))
        query, keys, values = heads
        group = config.num_heads // config.num_kv_heads
        out = [
            [reference.attention(query[h, t], self._round(keys[h // group]), self._round(values[h // group]), t)
             for h in range(config.num_heads)] for t in range(len(x))
        ]  # fmt: skip
        return torch.stack([torch.cat(row) for row in out])

    def _head(self, op: Head, x: Tensor) -> Tensor:
        logits = self._linear(self._input(x, op.norm), op.table, op.norm, op.norm_offset, op.scale)
        return reference.softcap(logits, op.softcap)
