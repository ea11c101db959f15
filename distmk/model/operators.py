"""A model as a list of operators, independent of ranks and workers.

Fields named after a matrix, a norm or a table hold checkpoint tensor names without `.weight` or `.bias`. x is the residual
stream, [tokens, hidden_size].
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.model.config import ModelConfig


@dataclass(frozen=True)
class Embedding:
    """x = table[token]."""

    table: str


@dataclass(frozen=True)
class SelfAttention:
    """x += o(attention(q, k, v of norm(x))): column-parallel q, k and v, row-parallel o.

    `q_norm`, `k_norm`: RMSNorm over each head, None in a model without it. `qkv_bias`, `o_bias`: whether the projections
    have a bias. `window`: positions that a query sees, its own included; None: all up to its own. `softcap`: scores become
    softcap * tanh(score / softcap). `scale`: of scores; None: head_dim ** -0.5.
    """

    layer: int
    norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str | None
    k_norm: str | None
    qkv_bias: bool
    o_bias: bool
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Mlp:
    """x += down(silu(gate(norm(x))) * up(norm(x))): column-parallel gate and up, row-parallel down.

    `bias`: whether the three projections have one.
    """

    layer: int
    norm: str
    gate: str
    up: str
    down: str
    bias: bool

    @property
    def name(self) -> str:
        """The prefix of its tasks' names."""
        return f"layer{self.layer}"


@dataclass(frozen=True)
class Head:
    """Greedy next token of sampled rows: argmax of the vocabulary-parallel head over norm(x)."""

    norm: str
    table: str


Operator = Embedding | SelfAttention | Mlp | Head


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama, Qwen2 or Qwen3 family: its configuration, and its operators in the order in which they run."""

    config: ModelConfig
    operators: tuple[Operator, ...]


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
                window=config.window(layer),
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
