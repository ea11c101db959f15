"""The last step of the compiler: operators behind all passes as the blocks that lowering takes, checked against the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from distmk.errors import UsageError
from distmk.model.config import ModelConfig
from distmk.model.nodes import Embedding, FusedAttention, Gated, Linear, Matrix, Node, Norm, Residual, Sum, Tokens
from distmk.model.operators import Embedding as EmbeddingBlock
from distmk.model.operators import Head, Mlp, Operator, SelfAttention
from distmk.model.rope import NO_ROPE


def blocks_of(logits: Node, config: ModelConfig) -> tuple[Operator, ...]:
    """The blocks of a decoder in order: the embedding, attention and MLP of each layer, the head.

    UsageError names the first operator, from the end, that is none of them: no task computes it.
    """
    reader = _Reader(config)
    if not isinstance(logits, Linear) or logits.parallel != "column" or len(logits.matrices) != 1:
        reader.refuse(logits, "the head, a column-parallel linear of the last norm")
    reader.expect("the head", logits.cols, config.vocab_size, "tokens")
    found: list[Operator] = [Head(reader.norm(logits), logits.matrices[0].tensor)]
    x, layer = logits.x, config.num_layers
    read: tuple[Callable[[Residual, int], Operator], ...] = (reader.mlp, reader.attention)
    while isinstance(x, Residual):
        layer -= 1
        for block in read:
            if not isinstance(x, Residual):
                reader.refuse(x, f"layer {layer} of attention and MLP")
            found.append(block(x, layer))
            x = x.x
    if not (isinstance(x, Sum) and isinstance(x.x, Embedding) and isinstance(x.x.tokens, Tokens)):
        reader.refuse(x, "the residual stream: the embedding, and what layers add to it")
    if layer:
        raise UsageError(f"forward has {config.num_layers - layer} layers; its config says {config.num_layers}")
    reader.expect("the embedding", x.x.num_tokens, config.vocab_size, "tokens")
    reader.expect("the embedding", x.cols, config.hidden_size, "columns")
    found.append(EmbeddingBlock(x.x.table))
    return tuple(reversed(found))


class _Reader:
    """Reads blocks of nodes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def attention(self, node: Residual, layer: int) -> SelfAttention:
        o, config = self._row_parallel(node), self.config
        if not isinstance(o.x, FusedAttention):
            self.refuse(o.x, f"attention of layer {layer}")
        fused = o.x
        q, k, v = fused.qkv.matrices
        self.expect(q.tensor, q.num_rows, config.num_heads * config.head_dim, "features")
        for matrix in (k, v):
            self.expect(matrix.tensor, matrix.num_rows, config.num_kv_heads * config.head_dim, "features")
        return SelfAttention(
            layer=layer,
            norm=self.norm(fused.qkv),
            q=q,
            k=k,
            v=v,
            o=self._matrix_of(o, node),
            q_norm=self._head_norm(fused.q_norm),
            k_norm=self._head_norm(fused.k_norm),
            rope=fused.rope or NO_ROPE,
        )

    def mlp(self, node: Residual, layer: int) -> Mlp:
        down = self._row_parallel(node)
        if not isinstance(down.x, Gated):
            self.refuse(down.x, f"the gated MLP of layer {layer}")
        gated = down.x
        gate, up = gated.gate_up.matrices
        for matrix in (gate, up):
            self.expect(matrix.tensor, matrix.num_rows, self.config.intermediate_size, "features")
        return Mlp(layer=layer, norm=self.norm(gated.gate_up), gate=gate, up=up, down=self._matrix_of(down, node))

    def norm(self, linear: Linear) -> str:
        """The weight of the norm in front of a product."""
        if linear.norm is None:
            self.refuse(linear.x, "a norm in front of it, folded into it")
        self._check_eps(linear.norm)
        return linear.norm.weight

    def _head_norm(self, norm: Norm | None) -> str | None:
        if norm is not None:
            self._check_eps(norm)
        return norm.weight if norm else None

    def _check_eps(self, norm: Norm) -> None:
        if norm.eps != self.config.rms_norm_eps:
            raise UsageError(
                f"{norm.weight} has eps {norm.eps:g}; the config's rms_norm_eps is {self.config.rms_norm_eps:g}"
            )

    def _row_parallel(self, node: Residual) -> Linear:
        if not isinstance(node.sum.x, Linear) or node.sum.x.parallel != "row":
            self.refuse(node.sum.x, "a row-parallel linear")
        return node.sum.x

    def _matrix_of(self, linear: Linear, node: Residual) -> Matrix:
        self.expect(linear.matrices[0].tensor, linear.cols, self.config.hidden_size, "features")
        return linear.matrices[0]

    def expect(self, what: str, found: int, expected: int, unit: str) -> None:
        if found != expected:
            raise UsageError(f"{what} has {found} {unit}; the config calls for {expected}")

    def refuse(self, node: Node, expected: str) -> NoReturn:
        raise UsageError(f"no task computes {node.describe()} here; expected {expected} (distmk graph shows each pass)")
