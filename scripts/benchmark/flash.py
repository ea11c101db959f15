"""Attention of a decode step in Triton: norms, rotation, cache and a split softmax in two kernels.

The positions of a sequence are divided among blocks (flash decoding, https://pytorch.org/blog/flash-decoding). Each
block works for all query heads of a key/value head. A second kernel merges the results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmark.model import Sizes

BLOCK = 32  # positions that are multiplied at once
MAX_SPLITS = 64
ROWS = 16  # query heads of a product: the least number for tensor cores


@triton.jit
def _turned(left, right, norm, half, cos, sin, eps, NORMED: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [rows, HALF] of both halves of heads, normalized and rotated."""
    if NORMED:
        squares = tl.sum(left * left + right * right, axis=1) / (2 * HALF)
        scale = 1.0 / tl.sqrt(squares + eps)
        left = left * scale[:, None] * tl.load(norm + half).to(tl.float32)[None, :]
        right = right * scale[:, None] * tl.load(norm + HALF + half).to(tl.float32)[None, :]
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    keys,
    values,
    q_norm,
    k_norm,
    rope,
    partial,
    max_and_sum,
    scale,
    eps,
    max_len,
    num_splits,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence).to(tl.int32)
    half, rows = tl.arange(0, HALF), tl.arange(0, ROWS)
    real = rows < GROUP
    # Each query head's split stores its largest score, the sum of its exponentials, and its unnormalized output.
    place = ((sequence * NUM_KV + head) * GROUP + rows) * num_splits + split
    begin = split * SPAN
    if begin > position:
        tl.store(max_and_sum + place * 2, tl.full([ROWS], float("-inf"), tl.float32), mask=real)
        return
    heads = qkv + sequence * (GROUP + 2) * NUM_KV * DIM
    cos = tl.load(rope + position * DIM + half)[None, :]
    sin = tl.load(rope + position * DIM + HALF + half)[None, :]
    q_at = heads + (head * GROUP + rows)[:, None] * DIM + half[None, :]
    q_left = tl.load(q_at, mask=real[:, None], other=0.0).to(tl.float32)
    q_right = tl.load(q_at + HALF, mask=real[:, None], other=0.0).to(tl.float32)
    q_left, q_right = _turned(q_left, q_right, q_norm, half, cos, sin, eps, NORMED, HALF)
    k_at = heads + (NUM_KV * GROUP + head) * DIM + half[None, :]
    k_left, k_right = tl.load(k_at).to(tl.float32), tl.load(k_at + HALF).to(tl.float32)
    k_left, k_right = _turned(k_left, k_right, k_norm, half, cos, sin, eps, NORMED, HALF)
    dtype = keys.dtype.element_ty
    q_left, q_right, k_left, k_right = q_left.to(dtype), q_right.to(dtype), k_left.to(dtype), k_right.to(dtype)
    whole = tl.arange(0, DIM)
    v_new = tl.load(heads + (NUM_KV * (GROUP + 1) + head) * DIM + whole)[None, :]
    cache = (sequence * NUM_KV + head) * max_len * DIM
    if position < begin + SPAN:
        tl.store(keys + cache + position * DIM + half[None, :], k_left)
        tl.store(keys + cache + position * DIM + HALF + half[None, :], k_right)
        tl.store(values + cache + position * DIM + whole[None, :], v_new)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(begin, tl.minimum(begin + SPAN, position + 1), BLOCK):
        at = first + tl.arange(0, BLOCK)
        old, new = (at < position)[:, None], (at == position)[:, None]
        k_row = keys + cache + at[:, None] * DIM + half[None, :]
        left = tl.where(new, k_left, tl.load(k_row, mask=old, other=0.0))
        right = tl.where(new, k_right, tl.load(k_row + HALF, mask=old, other=0.0))
        scores = (tl.dot(q_left, tl.trans(left)) + tl.dot(q_right, tl.trans(right))) * scale
        scores = tl.where((at <= position)[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        shares, kept = tl.exp(scores - better[:, None]), tl.exp(best - better)
        v = tl.load(values + cache + at[:, None] * DIM + whole[None, :], mask=old, other=0.0)
        v = tl.where(new, v_new, v)
        out = out * kept[:, None] + tl.dot(shares.to(dtype), v)
        total, best = total * kept + tl.sum(shares, axis=1), better
    tl.store(max_and_sum + place * 2, best, mask=real)
    tl.store(max_and_sum + place * 2 + 1, total, mask=real)
    tl.store(partial + place[:, None] * DIM + whole[None, :], out, mask=real[:, None])


@triton.jit
def _merge(partial, max_and_sum, out, num_splits, DIM: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0)
    splits, whole = tl.arange(0, SPLITS), tl.arange(0, DIM)
    place = head * num_splits + splits
    best = tl.load(max_and_sum + place * 2, mask=splits < num_splits, other=float("-inf"))
    there = best > float("-inf")
    weight = tl.where(there, tl.exp(best - tl.max(best, axis=0)), 0.0)
    total = tl.sum(weight * tl.load(max_and_sum + place * 2 + 1, mask=there, other=0.0), axis=0)
    parts = tl.load(partial + place[:, None] * DIM + whole[None, :], mask=there[:, None], other=0.0)
    tl.store(out + head * DIM + whole, tl.sum(parts * weight[:, None], axis=0) / total)


class FlashAttention:
    """Computes `Functions.attend` for one row per sequence. ValueError: the kernels do not fit the sizes."""

    def __init__(self, sizes: Sizes, positions: Tensor, max_len: int) -> None:
        self._sizes, self._positions, self._max_len = sizes, positions, max_len
        self._group, half = sizes.num_q // sizes.num_kv, sizes.head_dim // 2
        if half < 16 or half & (half - 1) or self._group > ROWS:
            raise ValueError(f"head_dim {sizes.head_dim}, {self._group} query heads a key/value head")
        self._span = BLOCK
        while -(-max_len // self._span) > MAX_SPLITS:
            self._span *= 2
        self._num_splits = -(-max_len // self._span)
        heads, memory = len(positions) * sizes.num_q, {"dtype": torch.float32, "device": positions.device}
        self._partial = torch.empty(heads, self._num_splits, sizes.head_dim, **memory)
        self._max_and_sum = torch.empty(heads, self._num_splits, 2, **memory)

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rope: Tensor
    ) -> Tensor:
        """[batch, num_q * head_dim]. The new keys and values are written into the caches."""
        sizes, batch = self._sizes, len(self._positions)
        out = qkv.new_empty(batch, sizes.num_q * sizes.head_dim)
        norms: tuple[Any, Any] = (qkv, qkv) if q_norm is None else (q_norm, k_norm)
        _attend_split[(sizes.num_kv, self._num_splits, batch)](
            qkv,
            self._positions,
            keys,
            values,
            *norms,
            rope,
            self._partial,
            self._max_and_sum,
            sizes.head_dim**-0.5,
            sizes.eps,
            self._max_len,
            self._num_splits,
            NUM_KV=sizes.num_kv,
            GROUP=self._group,
            HALF=sizes.head_dim // 2,
            SPAN=self._span,
            BLOCK=BLOCK,
            ROWS=ROWS,
            NORMED=q_norm is not None,
        )
        _merge[(batch * sizes.num_q,)](
            self._partial,
            self._max_and_sum,
            out,
            self._num_splits,
            DIM=sizes.head_dim,
            SPLITS=triton.next_power_of_2(self._num_splits),
        )
        return out
