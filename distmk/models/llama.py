"""Llama 1 to 3 (Touvron et al., arXiv:2302.13971), and models of the same architecture, such as SmolLM2."""

from __future__ import annotations

from distmk.model import nn
from distmk.model.causal_lm import CausalLM, register_model
from distmk.model.config import ModelConfig
from distmk.model.hf_features import layer_windows, read_num_layers
from distmk.model.json_fields import Fields
from distmk.model.nodes import Node
from distmk.model.read_config import read_decoder


@register_model("LlamaForCausalLM", "llama")
class Llama(CausalLM):
    norm_offset = 0.0
    activate = staticmethod(nn.silu)

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        bias, windows = f.flag("attention_bias"), layer_windows(f, read_num_layers(f), False)
        features = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": f.flag("mlp_bias"), "windows": windows}
        return read_decoder(f, cls.family, features, bos=(1,), eos=(2,))

    def forward(self, tokens: Node) -> Node:
        x = self.embed(tokens)
        for layer in range(self.config.num_layers):
            x = self.block(x, f"model.layers.{layer}", layer)
        return self.head(self.norm(x, "model.norm"))

    def block(self, x: Node, name: str, layer: int) -> Node:
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", layer)
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def embed(self, tokens: Node) -> Node:
        return nn.embedding(tokens, "model.embed_tokens", self.config.vocab_size, self.config.hidden_size)

    def head(self, x: Node) -> Node:
        return nn.linear(x, self.config.head_name, self.config.vocab_size)

    def norm(self, x: Node, name: str) -> Node:
        return nn.rms_norm(x, name, self.config.rms_norm_eps, offset=self.norm_offset)

    def attention(self, x: Node, name: str, layer: int) -> Node:
        c = self.config
        q, k, v = self.qkv(x, name)
        if c.qk_norm:
            q, k = (
                nn.head_norm(part, f"{name}.{which}_norm", c.rms_norm_eps, c.head_dim, offset=self.norm_offset)
                for part, which in ((q, "q"), (k, "k"))
            )
        out = self.attend(q, k, v, layer)
        return nn.linear(out, f"{name}.o_proj", c.hidden_size, bias=c.o_bias, parallel="row")

    def attend(self, q: Node, k: Node, v: Node, layer: int) -> Node:
        c = self.config
        q, k = self.rotated(q, layer), self.rotated(k, layer)
        return nn.attention(q, k, v, c.head_dim, window=c.window(layer), scores=c.scores)

    def rotated(self, x: Node, layer: int) -> Node:
        return nn.rope(x, self.config.head_dim)

    def qkv(self, x: Node, name: str) -> list[Node]:
        c = self.config
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
        return [nn.linear(x, f"{name}.{part}", num * c.head_dim, bias=c.qkv_bias) for part, num in heads.items()]

    def mlp(self, x: Node, name: str) -> Node:
        c = self.config
        gate, up = self.gate_up(x, name)
        return nn.linear(self.activate(gate) * up, f"{name}.down_proj", c.hidden_size, bias=c.mlp_bias, parallel="row")

    def gate_up(self, x: Node, name: str) -> list[Node]:
        c = self.config
        parts = ("gate_proj", "up_proj")
        return [nn.linear(x, f"{name}.{part}", c.intermediate_size, bias=c.mlp_bias) for part in parts]
