"""The peers' model: a decode step in parts, the same for eager, compiled and graphed runs, and the prompt before it.

Tensor parallelism is the usual one: columns of qkv, gate and up; rows of o and down, whose partial sums are added over
the ranks; and the head divided by vocabulary. Rank 0's partial sum includes the residual, so that the sum over ranks is
the next layer's input. Shapes: a step has `batch` rows, a prompt has one row per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.exchange import Exchange
from benchmark.weights import Layer, Weights


@dataclass(frozen=True)
class Sizes:
    """The sizes that a rank's functions are made for. `lead`: this rank adds the residual."""

    hidden: int
    num_q: int
    num_kv: int
    head_dim: int
    eps: float
    first_token: int
    lead: bool

    @staticmethod
    def of(weights: Weights, rank: int) -> Sizes:
        config, shard = weights.config, weights.shard
        return Sizes(
            config.hidden_size,
            shard.num_q,
            shard.num_kv,
            config.head_dim,
            config.rms_norm_eps,
            shard.vocab[0],
            rank == 0,
        )


class Functions:
    """The parts of a layer and the parts before and after the layers, without state, so that `torch.compile` can take them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.sizes.eps)

    def embed(self, tokens: Tensor, positions: Tensor, embedding: Tensor) -> Tensor:
        """[batch, hidden]: embeddings of the tokens [batch, max_len] at `positions` [batch]."""
        return embedding[tokens.gather(1, positions[:, None])[:, 0]]

    def project(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.linear(h, weight)

    def project_back(self, h: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A partial sum of the residual stream after x."""
        y = F.linear(h, weight)
        return x + y if self.sizes.lead else y

    def gated(self, h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Products of one shape with the activation after them: one kernel if there is one row."""
        return F.silu(F.linear(h, gate)) * F.linear(h, up)

    def best(self, h: Tensor, head: Tensor) -> Tensor:
        """float32 [rows, 2]: the largest logit of this rank's tokens, and its token."""
        logits = F.linear(h, head).float()
        num_rows, num_tokens = logits.shape
        # In two steps, because a single row would be processed by a single block.
        chunks = math.gcd(num_tokens, 64)
        values, indices = logits.view(num_rows, chunks, -1).max(dim=-1)
        value, chunk = values.max(dim=-1)
        index = indices.gather(1, chunk[:, None])[:, 0] + chunk * (num_tokens // chunks) + self.sizes.first_token
        return torch.stack([value, index.float()], dim=-1)

    def pick(self, candidates: Tensor) -> Tensor:
        """int64 [rows]: the tokens with the largest logits of [ranks, rows, 2]."""
        rank = candidates[:, :, 0].argmax(dim=0)
        return candidates[:, :, 1].gather(0, rank[None])[0].long()

    def append(self, candidates: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Write the next tokens after those at `positions`, and advance the positions."""
        positions += 1
        tokens.scatter_(1, positions[:, None], self.pick(candidates)[:, None])

    def turn(self, x: Tensor, norm: Tensor | None, rope: Tensor) -> Tensor:
        """Heads [sequences, rows, heads, head_dim], normalized if there is a norm, rotated by angles [sequences, rows,
        head_dim].
        """
        x = (self.norm(x, norm) if norm is not None else x).float()
        cos, sin = rope[:, :, None].chunk(2, dim=-1)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Tensor,
    ) -> Tensor:
        """[sequences * rows, num_q * head_dim], after the rows' keys and values were written to [sequences, num_kv,
        max_len, head_dim].

        `qkv`: [sequences * rows, ...], of rows at `positions` [sequences, rows].
        """
        num_q, num_kv, dim = self.sizes.num_q, self.sizes.num_kv, self.sizes.head_dim
        num_sequences, rows = positions.shape
        heads = qkv.view(num_sequences, rows, num_q + 2 * num_kv, dim)
        q, k, v = heads.split([num_q, num_kv, num_kv], dim=2)
        angles = rope[positions]
        q, k = self.turn(q, q_norm, angles).to(qkv.dtype), self.turn(k, k_norm, angles).to(qkv.dtype)
        sequences = torch.arange(num_sequences, device=qkv.device)[:, None]
        keys[sequences, :, positions] = k
        values[sequences, :, positions] = v
        # Query heads that share a key/value head are rows of one product.
        group, max_len = num_q // num_kv, keys.shape[2]
        q = q.view(num_sequences, rows, num_kv, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(num_sequences, num_kv, group * rows, dim)
        scores = (q @ keys.transpose(2, 3)).float() * dim**-0.5
        seen = torch.arange(max_len, device=qkv.device) <= positions[:, :, None]
        scores = scores.view(num_sequences, num_kv, group, rows, max_len)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        shares = scores.softmax(dim=-1).to(qkv.dtype).view(num_sequences, num_kv, group * rows, max_len)
        out = (shares @ values).view(num_sequences, num_kv, group, rows, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(num_sequences * rows, num_q * dim)


class Model:
    """A rank's weights and caches, and the tokens of every sequence: int64 [batch, max_len], the last one at `positions`."""

    def __init__(self, weights: Weights, rank: int, batch: int) -> None:
        self.weights, self.functions = weights, Functions(Sizes.of(weights, rank))
        max_len, device = weights.rope.shape[0], weights.embedding.device
        shape = (batch, weights.shard.num_kv, max_len, weights.config.head_dim)
        # A tensor for each, because compiled code would copy inputs that share memory with its outputs.
        self.caches = [
            tuple(torch.zeros(shape, dtype=weights.head.dtype, device=device) for _ in range(2)) for _ in weights.layers
        ]
        self.tokens = torch.zeros(batch, max_len, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)

    def read_prompts(self, prompts: list[list[int]], exchange: Exchange) -> None:
        """Fill the caches, and append the first token of every sequence."""
        for sequence, prompt in enumerate(prompts):
            x = self.last(sequence, prompt, exchange)
            candidates = exchange.gather(self.functions.best(x, self.weights.head))
            self.tokens[sequence, : len(prompt)] = torch.tensor(prompt, device=x.device)
            self.tokens[sequence, len(prompt)] = self.functions.pick(candidates)[0]
            self.positions[sequence] = len(prompt)

    def last(self, sequence: int, tokens: list[int], exchange: Exchange) -> Tensor:
        """[1, hidden], normalized: the head's input for the last token of a sequence that begins with `tokens`."""
        functions, weights, device = self.functions, self.weights, self.tokens.device
        x = weights.embedding[torch.tensor(tokens, device=device)]
        positions = torch.arange(len(tokens), device=device)[None]
        for layer, caches in zip(weights.layers, self.caches, strict=True):
            keys, values = (cache[sequence : sequence + 1] for cache in caches)
            qkv = functions.project(functions.norm(x, layer.input_norm), layer.qkv)
            attended = functions.attend(qkv, positions, keys, values, layer.q_norm, layer.k_norm, weights.rope)
            x = exchange.add_up(functions.project_back(attended, x, layer.o))
            gated = functions.gated(functions.norm(x, layer.mlp_norm), layer.gate, layer.up)
            x = exchange.add_up(functions.project_back(gated, x, layer.down))
        return functions.norm(x[-1:], weights.norm)

    def logits(self, tokens: list[int], exchange: Exchange) -> Tensor:
        """float32 [vocabulary]: logits of the token after `tokens`. Uses the first sequence's place in the caches."""
        return exchange.join(F.linear(self.last(0, tokens, exchange).float(), self.weights.head.float())[0])


Attend = Callable[[Tensor, Layer, tuple[Tensor, ...]], Tensor]


@dataclass
class Step:
    """A decode step of all sequences of `model`.

    Its parts are `Functions`, which a compiler may fuse. Between two parts the result is in memory; otherwise a product
    might compute its input anew for every row of its matrix.
    """

    model: Model
    exchange: Exchange
    embed: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    project: Callable[..., Tensor]
    attend: Attend
    project_back_into: Callable[..., None]
    gated: Callable[..., Tensor]
    best: Callable[..., Tensor]
    append: Callable[..., None]

    def __call__(self) -> None:
        weights, exchange, model = self.model.weights, self.exchange, self.model
        x = self.embed(model.tokens, model.positions, weights.embedding)
        for layer, caches in zip(weights.layers, model.caches, strict=True):
            x = self.layer(x, layer, caches, exchange)
        candidates = exchange.gather(self.best(self.norm(x, weights.norm), weights.head))
        self.append(candidates, model.tokens, model.positions)

    def layer(self, x: Tensor, layer: Layer, caches: tuple[Tensor, ...], exchange: Exchange) -> Tensor:
        first, second = exchange.sums
        attended = self.attend(self.project(self.norm(x, layer.input_norm), layer.qkv), layer, caches)
        self.project_back_into(first, attended, x, layer.o)
        x = exchange.add_up(first)
        gated = self.gated(self.norm(x, layer.mlp_norm), layer.gate, layer.up)
        self.project_back_into(second, gated, x, layer.down)
        return exchange.add_up(second)
