"""A model as a list of operators, independent of ranks and workers.

Fields named after a matrix, a norm or a table hold checkpoint tensor names without `.weight` or `.bias`. x is the residual
stream, [tokens, hidden_size]. `norm_offset` is added to the weights of an operator's norms: 1 where a checkpoint has them as
their distance from 1 (Gemma). Scales and offsets go into the weights when these are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distmk.model.config import ModelConfig

Activation = Literal["silu", "gelu_tanh"]
"""Of a gated MLP: SiLU, or GELU in its tanh approximation (transformers' gelu_pytorch_tanh)."""


@dataclass(frozen=True)
class Embedding:
    """x = scale * table[token]."""

    table: str
    scale: float = 1.0


@dataclass(frozen=True)
class SelfAttention:
    """x += post_norm(out_scale * o(attention(q, k, v of norm(x)))): column-parallel q, k and v, row-parallel o.

    `norm`, `post_norm`: RMSNorm over the rows of x and of what is added to x. `q_norm`, `k_norm`: RMSNorm over each head. Each is
    None in a model without it. `qkv_bias`, `o_bias`: whether the projections have a bias.
    """

    layer: int
    norm: str | None
    q: str
    k: str
    v: str
    o: str
    q_norm: str | None
    k_norm: str | None
    qkv_bias: bool
    o_bias: bool
    post_norm: str | None = None
    norm_offset: float = 0.0
    out_scale: float = 1.0

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Mlp:
    """x += post_norm(out_scale * down(activation(gate(norm(x))) * up(norm(x)))): column-parallel gate and up, row-parallel down.

    `norm`, `post_norm`: see `SelfAttention`. `bias`: whether the three projections have one.
    """

    layer: int
    norm: str | None
    gate: str
    up: str
    down: str
    bias: bool
    activation: Activation = "silu"
    post_norm: str | None = None
    norm_offset: float = 0.0
    out_scale: float = 1.0

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Head:
    """Greedy next token of sampled rows: argmax of the logits, scale * table @ norm(x), the table vocabulary-parallel.

    softcap: what is sampled from, and reported, is softcap * tanh(logits / softcap); None: the logits.
    """

    norm: str
    table: str
    norm_offset: float = 0.0
    scale: float = 1.0
    softcap: float | None = None


Operator = Embedding | SelfAttention | Mlp | Head


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama, Qwen2 or Qwen3 family: its configuration, and its operators in the order in which they run."""

    config: ModelConfig
    operators: tuple[Operator, ...]

    @property
    def has_post_norms(self) -> bool:
        """Whether some operator normalizes what it adds to x."""
        return any(isinstance(op, SelfAttention | Mlp) and op.post_norm is not None for op in self.operators)


def build_model(config: ModelConfig) -> Model:
    """The operators of `config`, in order (Llama: Touvron et al., arXiv:2302.13971; Qwen3: arXiv:2505.09388)."""
    embed = "model.embed_tokens"
    operators: list[Operator] = [Embedding(embed)]
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        operators.append(
            SelfAttention(
                layer=layer,
                norm=f"model.layers.{layer}.input_layernorm",
                q=f"{attention}.q_proj",
                k=f"{attention}.k_proj",
                v=f"{attention}.v_proj",
                o=f"{attention}.o_proj",
                q_norm=f"{attention}.q_norm" if config.qk_norm else None,
                k_norm=f"{attention}.k_norm" if config.qk_norm else None,
                qkv_bias=config.qkv_bias,
                o_bias=config.o_bias,
            )
        )
        operators.append(
            Mlp(
                layer=layer,
                norm=f"model.layers.{layer}.post_attention_layernorm",
                gate=f"{mlp}.gate_proj",
                up=f"{mlp}.up_proj",
                down=f"{mlp}.down_proj",
                bias=config.mlp_bias,
            )
        )
    operators.append(Head("model.norm", embed if config.tie_embeddings else "lm_head"))
    return Model(config, tuple(operators))
