"""What every task type should compute, in torch and float64: written from the definitions of the models, not from csrc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distmk.abi import PLAIN_SCORES, Epilogue, Scores
from distmk.model import nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)


def hard_to_round(num_rows: int, num_cols: int) -> Tensor:
    """float32 numbers halfway between two of bf16, and their neighbours on either side."""
    shape = (num_rows, num_cols)
    sign, exponent = torch.randint(0, 2, shape) << 31, torch.randint(107, 148, shape) << 23
    fraction, beside = torch.randint(0, 128, shape) << 16, torch.randint(0x7FFF, 0x8002, shape)
    return (sign | exponent | fraction | beside).int().view(torch.float32)


def over_rms(x: Tensor, eps: float | None) -> Tensor:
    """x / rms of its rows; x if `eps` is None."""
    return x.double() if eps is None else F.rms_norm(x.double(), (x.shape[-1],), eps=eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float | None = None) -> Tensor:
    """[rows, n]: x [rows, k], divided by the rms of its rows if `eps` is given, times weight [n, k], plus bias."""
    return F.linear(over_rms(x, eps), weight.double(), None if bias is None else bias.double())


def linear_scale(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float | None = None) -> Tensor:
    """The sum of the magnitudes that `linear` adds up, to which its rounding errors are proportional."""
    return F.linear(over_rms(x, eps).abs(), weight.double().abs(), None if bias is None else bias.double().abs())


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By name, as in `nn.ACTIVATIONS`. Their derivatives stay within 1.13, so an error of x passes on in proportion."""


def gated(epilogue: Epilogue, gate_up: Tensor) -> Tensor:
    """activation(gate) * up, as a gated epilogue computes it."""
    (activate,) = (ACTIVATIONS[name] for name, each in nn.ACTIVATIONS.items() if each is epilogue)
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate) * up


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Numbers of any size as numbers within `cap`; None: as they are."""
    return x if cap is None else cap * torch.tanh(x / cap)


def rope_table(num_positions: int, head_dim: int, theta: float = 10000.0) -> Tensor:
    """float32 [positions, head_dim]: cosines, then sines."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [..., head_dim] with rows of the table (broadcast): the rotate-half convention of Hugging Face."""
    cos, sin = table.double().chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cos + torch.cat([-second, first], dim=-1) * sin


class Scoring(NamedTuple):
    """Which positions a query sees, and how it scores their keys.

    window: it sees the positions (its own - window, its own]; None: all up to its own.
    """

    window: int | None = None
    scores: Scores = PLAIN_SCORES

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def score(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores of keys [..., length, head_dim] for a query [head_dim] or queries [..., rows, head_dim]."""
        scale = query.shape[-1] ** -0.5 if self.scores.scale is None else self.scores.scale
        return softcap(query.double() @ keys.double().mT * scale, self.scores.softcap)


def attention(query: Tensor, keys: Tensor, values: Tensor, position: int, how: Scoring) -> Tensor:
    """One query [head_dim] at `position` over the keys and values [length, head_dim] that it sees."""
    seen = slice(how.first_seen(position), position + 1)
    return torch.softmax(how.score(query, keys[seen]), dim=0) @ values[seen].double()


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, position: int, begin: int, end: int, how: Scoring
) -> tuple[float, float, Tensor]:
    """Maximum, sum and unnormalised accumulator over the positions [begin, end) that the query sees."""
    begin, end = max(begin, how.first_seen(position)), min(end, position + 1)
    if end <= begin:
        return -torch.inf, 0.0, torch.zeros(query.shape[-1], dtype=torch.float64)
    found = how.score(query, keys[begin:end])
    weights = (found - found.max()).exp()
    return found.max().item(), weights.sum().item(), weights @ values[begin:end].double()


def split_bounds(first: int, kv_len: int, num_splits: int) -> list[int]:
    """Bounds of the splits of [first, kv_len): inside, multiples of 16 where splits have 16 positions or more on average."""
    length = kv_len - first
    step = 16 if length >= 16 * num_splits else 1
    return [first, *((first + length * i // num_splits) // step * step for i in range(1, num_splits)), kv_len]


def num_splits(
    seen: list[int], run: int, num_kv: int, num_workers: int, min_kv_split_len: int, max_kv_splits: int
) -> int:
    """Splits of a run. An only run has one for each worker, with at least `min_kv_split_len` positions each; from 8 on in eights.

    Several runs have splits of up to one length, with which they have no more than there are workers: 17/16 of the mean or of
    `min_kv_split_len`, or a sixteenth more, and so on. Lengths of more than twice the mean are of no use; then it is the mean.
    seen: positions that each run sees.
    """
    budget = max(1, num_workers // num_kv)
    if len(seen) == 1:
        count = max(1, min(budget, -(-seen[0] // min_kv_split_len), max_kv_splits))
        return count if count < 8 else count // 8 * 8
    mean = max(sum(seen) // budget, min_kv_split_len)
    lengths = [mean + mean // 16]
    while lengths[-1] <= 2 * mean:
        lengths.append(lengths[-1] + lengths[-1] // 16 + 1)
    fitting = [length for length in lengths[:-1] if sum(-(-each // length) for each in seen) <= budget]
    return min(max_kv_splits, -(-seen[run] // min(fitting, default=mean)))
