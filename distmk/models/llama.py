"""Llama 1 to 3 (Touvron et al., arXiv:2302.13971), and what has their architecture, as SmolLM2."""

from __future__ import annotations

from distmk.model import nn
from distmk.model.causal_lm import CausalLM, register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import layer_windows
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder


@register_model("LlamaForCausalLM", "llama")
class Llama(CausalLM):
    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        bias, windows = f.flag("attention_bias"), layer_windows(f, f.integer("num_hidden_layers"), False)
        features = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": f.flag("mlp_bias"), "windows": windows}
        return read_decoder(f, cls.family, features, bos=(1,), eos=(2,))

    def forward(self, tokens: Node) -> Node:
        x = self.embed(tokens)
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", layer)
            x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return self.head(self.norm(x, "model.norm"))

    def embed(self, tokens: Node) -> Node:
        return nn.embedding(tokens, "model.embed_tokens", self.config.vocab_size, self.config.hidden_size)

    def head(self, x: Node) -> Node:
        return nn.linear(x, self.config.head_name, self.config.vocab_size)

    def norm(self, x: Node, name: str) -> Node:
        return nn.rms_norm(x, name, self.config.rms_norm_eps)

    def attention(self, x: Node, name: str, layer: int) -> Node:
        c = self.config
        q, k, v = self.qkv(x, name)
        if c.qk_norm:
            q = nn.head_norm(q, f"{name}.q_norm", c.rms_norm_eps, c.head_dim)
            k = nn.head_norm(k, f"{name}.k_norm", c.rms_norm_eps, c.head_dim)
        out = self.attend(q, k, v, layer)
        return nn.linear(out, f"{name}.o_proj", c.hidden_size, bias=c.o_bias, parallel="row")

    def attend(self, q: Node, k: Node, v: Node, layer: int) -> Node:
        c = self.config
        return nn.attention(self.rotated(q, layer), self.rotated(k, layer), v, c.head_dim, window=c.window(layer))

    def rotated(self, x: Node, layer: int) -> Node:
        return nn.rope(x, self.config.head_dim)

    def qkv(self, x: Node, name: str) -> list[Node]:
        c = self.config
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
        return [nn.linear(x, f"{name}.{part}", num * c.head_dim, bias=c.qkv_bias) for part, num in heads.items()]

    def mlp(self, x: Node, name: str) -> Node:
        c = self.config
        gate, up = self.gate_up(x, name)
        return nn.linear(nn.silu(gate) * up, f"{name}.down_proj", c.hidden_size, bias=c.mlp_bias, parallel="row")

    def gate_up(self, x: Node, name: str) -> list[Node]:
        c = self.config
        parts = ("gate_proj", "up_proj")
        return [nn.linear(x, f"{name}.{part}", c.intermediate_size, bias=c.mlp_bias) for part in parts]
