"""A rank's part of a model's weights as plain torch tensors, with the values that distmk fills its own memory with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmk.backends.weight_upload import rope_table
from distmk.errors import UsageError
from distmk.model.config import ModelConfig
from distmk.model.shards import Shard, shard_model
from distmk.weights import Checkpoint
from distmk.weights.checkpoint import EMBEDDING, HEAD, RowRange
from distmk.weights.rows import open_rows


@dataclass
class Layer:
    """Matrices are [outputs, inputs]; `qkv` has three matrices, one below the other. Norms of heads are None in a Llama."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass
class Weights:
    """One rank's weights; the embedding is whole. `rope`: float32 [positions, head_dim], cosines and sines."""

    config: ModelConfig
    shard: Shard
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    rope: Tensor


class Reader:
    """Reads parts of a checkpoint to `device` as `dtype`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._rows = open_rows(checkpoint, device.type)

    def matrix(self, parts: Sequence[RowRange], cols: slice) -> Tensor:
        """Columns `cols` of the rows of `parts`, one below the other.

        Read in pieces, because each read needs additional memory.
        """
        num_cols = cols.stop - cols.start
        out = torch.empty(sum(end - begin for _, begin, end in parts), num_cols, dtype=self._dtype, device=self._device)
        step, at = max(1, self._rows.piece_bytes // (2 * num_cols)), 0
        for name, begin, end in parts:
            for first in range(begin, end, step):
                last = min(first + step, end)
                bits = self._rows.read([(name, first, last)], cols)
                block = bits if isinstance(bits, Tensor) else torch.from_numpy(bits.view("int16"))
                out[at : at + last - first] = block.view(torch.bfloat16)
                at += last - first
        return out

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._checkpoint.read_vector(name)).to(self._device, self._dtype)


def read_weights(
    checkpoint: Checkpoint, num_ranks: int, rank: int, max_len: int, device: torch.device, dtype: torch.dtype
) -> Weights:
    """This rank's part, for sequences of up to `max_len` positions. UsageError: the peers cannot compute the model."""
    config = checkpoint.config
    check_peers_can(config, num_ranks)
    shard = shard_model(config, num_ranks)[rank]
    reader = Reader(checkpoint, device, dtype)
    hidden = slice(0, config.hidden_size)
    return Weights(
        config,
        shard,
        embedding=reader.matrix([(EMBEDDING, 0, config.vocab_size)], hidden),
        layers=[_read_layer(reader, config, shard, f"model.layers.{i}.") for i in range(config.num_layers)],
        norm=reader.vector("model.norm.weight"),
        head=reader.matrix([(HEAD, *shard.vocab)], hidden),
        rope=torch.from_numpy(rope_table(config, max_len)).to(device),
    )


def check_peers_can(config: ModelConfig, num_ranks: int) -> None:
    """UsageError unless every rank's query heads make whole groups, and there are no biases."""
    if config.qkv_bias or config.o_bias or config.mlp_bias:
        raise UsageError("the peers have no biases, and this model has; give a model without, such as qwen3-8b")
    shards = shard_model(config, num_ranks)
    group = config.num_heads // config.num_kv_heads
    for shard in shards:
        if shard.num_kv > 1 and (shard.heads[0] % group or shard.heads[1] % group):
            raise UsageError(
                f"{config.num_heads} query and {config.num_kv_heads} key/value heads do not part evenly into "
                f"{num_ranks} ranks, which the peers need; start another number of ranks"
            )


def _read_layer(reader: Reader, config: ModelConfig, shard: Shard, prefix: str) -> Layer:
    head = config.head_dim
    q_rows, kv_rows = ([head * bound for bound in bounds] for bounds in (shard.heads, shard.kv_heads))
    qkv = [
        (f"{prefix}self_attn.{name}_proj.weight", *rows)
        for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
    ]
    hidden, outputs = slice(0, config.hidden_size), (0, config.hidden_size)
    q_norm, k_norm = (
        reader.vector(f"{prefix}self_attn.{name}_norm.weight") if config.qk_norm else None for name in "qk"
    )
    return Layer(
        input_norm=reader.vector(f"{prefix}input_layernorm.weight"),
        qkv=reader.matrix(qkv, hidden),
        q_norm=q_norm,
        k_norm=k_norm,
        o=reader.matrix([(f"{prefix}self_attn.o_proj.weight", *outputs)], slice(*q_rows)),
        mlp_norm=reader.vector(f"{prefix}post_attention_layernorm.weight"),
        gate=reader.matrix([(f"{prefix}mlp.gate_proj.weight", *shard.mlp)], hidden),
        up=reader.matrix([(f"{prefix}mlp.up_proj.weight", *shard.mlp)], hidden),
        down=reader.matrix([(f"{prefix}mlp.down_proj.weight", *outputs)], slice(*shard.mlp)),
    )
