"""A model of a user's own, in a module that worker processes can import: one matrix for q, k and v, and names of its own."""

from __future__ import annotations

from distmk import CausalLM, ModelConfig, nn
from distmk.model.nodes import Node

CONFIG = ModelConfig(
    hidden_size=24,
    intermediate_size=33,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    vocab_size=61,
    max_position=96,
    rms_norm_eps=1e-5,
)


class OwnLM(CausalLM):
    matrix_format = "bf16"

    def forward(self, tokens: Node) -> Node:
        c, eps, kind = self.config, self.config.rms_norm_eps, self.matrix_format
        q_cols, kv_cols = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        x = nn.embedding(tokens, "embed", c.vocab_size, c.hidden_size, format=kind)
        for i in range(c.num_layers):
            qkv = nn.linear(nn.rms_norm(x, f"{i}.norm1", eps), f"{i}.qkv", q_cols + 2 * kv_cols, bias=True)
            q, k, v = nn.split(qkv, [q_cols, kv_cols, kv_cols])
            out = nn.attention(nn.rope(q, c.head_dim), nn.rope(k, c.head_dim), v, c.head_dim)
            x = x + nn.linear(out, f"{i}.o", c.hidden_size, parallel="row", format=kind)
            normalized = nn.rms_norm(x, f"{i}.norm2", eps)
            both = nn.linear(normalized, f"{i}.gate_up", 2 * c.intermediate_size, format=kind)
            gate, up = nn.split(both, [c.intermediate_size, c.intermediate_size])
            x = x + nn.linear(nn.silu(gate) * up, f"{i}.down", c.hidden_size, parallel="row")
        return nn.linear(nn.rms_norm(x, "norm", eps), "head", c.vocab_size)


class PackedLM(OwnLM):
    """With the embedding, o, gate and up in FP8."""

    matrix_format = "fp8"
