"""The last step of the compiler: turns operators into the blocks that lowering takes, and checks them against the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from distmk.errors import UsageError
from distmk.model.config import ModelConfig
from distmk.model.nodes import (
    Add,
    Embedding,
    FusedAttention,
    Gated,
    Linear,
    Matrix,
    Node,
    Norm,
    Residual,
    Softcap,
    Sum,
    Tokens,
)
from distmk.model.operators import Embedding as EmbeddingBlock
from distmk.model.operators import Head, Mlp, Operator, SelfAttention
from distmk.model.rope import NO_ROPE


def blocks_of(logits: Node, config: ModelConfig) -> tuple[Operator, ...]:
    """The blocks of a decoder in order: the embedding, attention and MLP of each layer, the head.

    UsageError: an operator is no part of a block, so no task computes it. The text names the first such operator from
    the end.
    """
    reader = _Reader(config)
    softcap = None
    if isinstance(logits, Softcap):
        softcap, logits = logits.cap, logits.x
    if not isinstance(logits, Linear) or logits.parallel != "column" or len(logits.matrices) != 1:
        reader.refuse(logits, "the head, a column-parallel linear of the last norm")
    reader.expect("the head", logits.cols, config.vocab_size, "tokens")
    table = logits.matrices[0]
    if table.bias:
        reader.refuse(logits, "a head without a bias")
    if logits.norm is None:
        reader.refuse(logits.x, "a norm in front of the head, folded into it")
    norm, offset = reader.norms(logits.norm)
    blocks: list[Operator] = [Head(str(norm), table.tensor, offset, table.scale, softcap, table.format)]
    x, layer = logits.x, config.num_layers
    read: tuple[Callable[[Residual, int], Operator], ...] = (reader.mlp, reader.attention)
    while isinstance(x, Residual):
        layer -= 1
        for block in read:
            if not isinstance(x, Residual):
                reader.refuse(x, f"layer {layer} of attention and MLP")
            blocks.append(block(x, layer))
            x = x.x
    if not (isinstance(x, Sum) and isinstance(x.x, Embedding) and isinstance(x.x.tokens, Tokens)):
        while isinstance(x, Add) and isinstance(x.x, Add):  # find the first one that is not a residual
            x = x.x
        reader.refuse(x, 'the residual stream: the embedding, and what linears of parallel="row" add to it')
    if layer:
        raise UsageError(f"forward has {config.num_layers - layer} layers; its config says {config.num_layers}")
    reader.expect("the embedding", x.x.num_tokens, config.vocab_size, "tokens")
    reader.expect("the embedding", x.cols, config.hidden_size, "columns")
    blocks.append(EmbeddingBlock(x.x.table, x.x.scale, x.x.format))
    return tuple(reversed(blocks))


class _Reader:
    """Reads blocks of nodes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def attention(self, node: Residual, layer: int) -> SelfAttention:
        o, config = self._row_parallel(node), self.config
        if not isinstance(o.x, FusedAttention):
            self.refuse(
                o.x,
                f"attention of layer {layer}: of column-parallel linears of one tensor, q and k behind the same rope or none, "
                "a head_norm only in front of that, and v behind neither",
            )
        fused = o.x
        self._expect_stream(fused.qkv, node.x)
        self.expect(f"a head of attention of layer {layer}", fused.head_dim, config.head_dim, "elements")
        q, k, v = self._matrices(fused.qkv)
        norm, offset = self.norms(fused.qkv.norm, fused.q_norm, fused.k_norm, node.post_norm)
        self.expect(q.tensor, q.num_rows, config.num_heads * config.head_dim, "features")
        for matrix in (k, v):
            self.expect(matrix.tensor, matrix.num_rows, config.num_kv_heads * config.head_dim, "features")
        return SelfAttention(
            layer=layer,
            norm=norm,
            q=q,
            k=k,
            v=v,
            o=self._matrix_of(o),
            q_norm=_weight_of(fused.q_norm),
            k_norm=_weight_of(fused.k_norm),
            rope=fused.rope or NO_ROPE,
            post_norm=_weight_of(node.post_norm),
            norm_offset=offset,
            window=fused.window,
            scores=fused.scores,
        )

    def mlp(self, node: Residual, layer: int) -> Mlp:
        down = self._row_parallel(node)
        if not isinstance(down.x, Gated):
            self.refuse(
                down.x, f"the MLP of layer {layer}: activation(gate) * up, of column-parallel linears of one tensor"
            )
        gated = down.x
        self._expect_stream(gated.gate_up, node.x)
        gate, up = self._matrices(gated.gate_up)
        norm, offset = self.norms(gated.gate_up.norm, node.post_norm)
        for matrix in (gate, up):
            self.expect(matrix.tensor, matrix.num_rows, self.config.intermediate_size, "features")
        return Mlp(
            layer=layer,
            norm=norm,
            gate=gate,
            up=up,
            down=self._matrix_of(down),
            activation=gated.function,
            post_norm=_weight_of(node.post_norm),
            norm_offset=offset,
        )

    def norms(self, first: Norm | None, *others: Norm | None) -> tuple[str | None, float]:
        """The weight of `first`, and the offset that all norms of a block share."""
        given = [norm for norm in (first, *others) if norm]
        for norm in given:
            if norm.eps != self.config.rms_norm_eps:
                raise UsageError(
                    f"{norm.weight} has eps {norm.eps:g}; the config's rms_norm_eps is {self.config.rms_norm_eps:g}"
                )
            if norm.offset != given[0].offset:
                raise UsageError(
                    f"{norm.weight} has the offset {norm.offset:g}; {given[0].weight}, beside it, has {given[0].offset:g}"
                )
        return _weight_of(first), given[0].offset if given else 0.0

    def _expect_stream(self, linear: Linear, x: Node) -> None:
        if linear.x is not x:
            self.refuse(linear.x, "the residual stream as it is there, or a norm of it that is folded into the product")

    def _matrices(self, linear: Linear) -> tuple[Matrix, ...]:
        if any(matrix.scale != 1.0 for matrix in linear.matrices):
            self.refuse(linear, "a product without a factor")
        if len({matrix.bias for matrix in linear.matrices}) > 1:
            self.refuse(linear, "a bias of every matrix or of none")
        return linear.matrices

    def _row_parallel(self, node: Residual) -> Linear:
        if not isinstance(node.sum.x, Linear) or node.sum.x.parallel != "row":
            self.refuse(node.sum.x, "a row-parallel linear")
        return node.sum.x

    def _matrix_of(self, linear: Linear) -> Matrix:
        self.expect(linear.matrices[0].tensor, linear.cols, self.config.hidden_size, "features")
        return linear.matrices[0]

    def expect(self, what: str, actual: int, expected: int, unit: str) -> None:
        if actual != expected:
            raise UsageError(f"{what} has {actual} {unit}; the config calls for {expected}")

    def refuse(self, node: Node, expected: str) -> NoReturn:
        inputs = ", ".join(" ".join([value.kind, *value.tensors]) for value in node.inputs)
        raise UsageError(
            f"no task computes {node.describe(inputs)} here; expected {expected} (distmk graph shows each pass)"
        )


def _weight_of(norm: Norm | None) -> str | None:
    return norm.weight if norm else None
