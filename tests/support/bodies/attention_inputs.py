"""One attention launch of a rank on any backend: its inputs, and what it and the combine behind it must leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from support import reference
from support.batches import make_batch, random_runs

from distmk.abi import (
    COMBINE_WIDTH,
    FUSED_PARTIAL_HEADER,
    MAX_ROWS,
    PARTIAL_FLOATS,
    PARTIAL_HEADER_FLOATS,
    POSITIONS_PER_PASS,
)
from distmk.tasks import AttentionShape
from distmk.tasks.splits import ANY_LENGTH
from distmk.testing.arrays import ROUNDING, assert_close, floats

Instance = tuple[int, int, int]  # run, KV head, split
PLAIN = reference.Scoring()
SCORE_ROUNDING = 2.0**-17
"""Relative error of a score: GPUs multiply a query as the sum of two bf16 numbers."""


@dataclass
class Heads:
    """A rank's share of the heads of a model."""

    num_q: int
    group: int
    q_begin: int = 0

    @property
    def kv_begin(self) -> int:
        return self.q_begin // self.group

    @property
    def num_kv(self) -> int:
        return (self.q_begin + self.num_q - 1) // self.group - self.kv_begin + 1

    def kv_head(self, q_head: int) -> int:
        return (self.q_begin + q_head) // self.group - self.kv_begin


class AttentionInputs:
    """Random runs over a paged cache: old positions hold numbers, all others NaN; the pages of a sequence are scattered.

    qkv: f32 [rows, columns]; rope: f32 [positions, head_dim]; caches: bf16 [K and V, page, KV head, position, head_dim];
    pages: i32 [slot, max_pages].
    """

    def __init__(
        self,
        rng: np.random.Generator,
        heads: Heads,
        head_dim: int,
        page_size: int,
        norms: bool,
        max_len: int,
        batch_1: bool = False,  # a single row, which may have more splits
        fused_partials: bool = False,  # the combine of a batch-1 row is fused, unless it has too many splits
        how: reference.Scoring = PLAIN,
        runs: list[tuple[int, int, int]] | None = None,  # rows, slot, positions after this iteration; None: at random
    ):
        self.rng, self.heads, self.head_dim, self.fused_partials = rng, heads, head_dim, fused_partials
        self.how = how
        # A row that may be longer gets as many splits as a fused combine takes, of more positions than warps hold at once.
        long = batch_1 and max_len > COMBINE_WIDTH * POSITIONS_PER_PASS
        shortest = COMBINE_WIDTH * POSITIONS_PER_PASS if long else 1
        self.runs = [(1, int(rng.integers(MAX_ROWS)), int(rng.integers(shortest, max_len + 1)))] if batch_1 else []
        self.runs = runs or self.runs or random_runs(rng, max_len)
        self.batch = make_batch(self.runs, rng)
        max_pages = -(-max(kv_len for _, _, kv_len in self.runs) // page_size) + int(rng.integers(0, 3))
        num_pages = max_pages * len(self.runs) + 2
        workers, min_kv_split_len, max_kv_splits = (
            int(rng.integers(1, top)) for top in (12, 40, int(rng.choice([4, 9])))
        )
        if batch_1:
            workers, max_kv_splits = heads.num_kv * int(rng.integers(1, 33)), int(rng.integers(1, rng.choice([3, 33])))
            min_kv_split_len = int(rng.integers(1, rng.choice([3, 40])))
        if long:
            workers, max_kv_splits, min_kv_split_len = (
                heads.num_kv * int(rng.integers(8, 33)),
                int(rng.integers(8, 33)),
                64,
            )
        self.shape = AttentionShape(
            heads.num_q, heads.num_kv, head_dim, heads.group, heads.q_begin, heads.kv_begin, page_size, max_pages,
            num_pages, max_kv_splits, min_kv_split_len, workers,
            window=how.window or ANY_LENGTH, scores=how.scores,
        )  # fmt: skip
        self.norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else None
        self.qkv = torch.randn(self.batch.num_rows, self.shape.qkv_cols + 4 * int(rng.integers(0, 3)))
        self.qkv[:, self.shape.qkv_cols :] = torch.nan  # a row's padding
        self.rope = reference.rope_table(max_len + MAX_ROWS, head_dim)
        self._make_caches()

    def _make_caches(self) -> None:
        s = self.shape
        self.pages = np.full((MAX_ROWS, s.max_pages), -1, dtype=np.int32)
        free = self.rng.permutation(s.num_pages)
        self.caches = torch.full((2, s.num_pages, s.num_kv, s.page_size, s.head_dim), torch.nan).bfloat16()
        for num_rows, slot, kv_len in self.runs:
            used = -(-kv_len // s.page_size)
            self.pages[slot, :used], free = free[:used], free[used:]
            for position in range(kv_len - num_rows):
                page = self.pages[slot, position // s.page_size]
                self.caches[:, page, :, position % s.page_size] = torch.randn(2, s.num_kv, s.head_dim).bfloat16()

    def values_without(self, element: int) -> None:
        """An element of all values is zero."""
        s = self.shape
        column = self.caches[1, ..., element]
        column[~column.isnan()] = 0
        first = (s.num_q + s.num_kv) * s.head_dim + element
        self.qkv[:, first : s.qkv_cols : s.head_dim] = 0

    @property
    def fuses_combine(self) -> bool:
        """Whether the batch is a single row that the tasks which multiply it combine."""
        return self.fused_partials and self.batch.num_rows == 1 and self.seen(0) <= self.shape.fused_combine_len

    def swizzled(self, caches: torch.Tensor) -> torch.Tensor:
        """`caches` as a GPU keeps them, or from there back: 16-byte piece i of position p of a page changes places with piece
        i ^ (p % 8 ^ p % 2 * 4), where both come in eights.
        """
        s = self.shape
        if s.head_dim % 64 or s.page_size % 8:
            return caches
        position = torch.arange(s.page_size)[:, None]
        piece = torch.arange(s.head_dim // 8)[None] ^ (position % 8 ^ position % 2 * 4)
        return caches.unflatten(-1, (-1, 8))[..., position, piece, :].flatten(-2)

    def first_seen(self, run: int) -> int:
        """The first position that a row of a run sees."""
        num_rows, _, kv_len = self.runs[run]
        return self.how.first_seen(kv_len - num_rows)

    def seen(self, run: int) -> int:
        """Positions that the rows of a run see together."""
        return self.runs[run][2] - self.first_seen(run)

    def splits(self, run: int) -> int:
        s, seen = self.shape, [self.seen(i) for i in range(len(self.runs))]
        most = min(s.max_kv_splits, COMBINE_WIDTH) if self.fuses_combine else s.max_kv_splits
        return reference.num_splits(seen, run, s.num_kv, s.num_workers, s.min_kv_split_len, most)

    def split_bounds(self, run: int) -> list[int]:
        return reference.split_bounds(self.first_seen(run), self.runs[run][2], self.splits(run))

    def instances(self) -> list[Instance]:
        """Every instance of the launch, in order."""
        return [
            (run, kv_head, split)
            for run in range(len(self.runs))
            for kv_head in range(self.shape.num_kv)
            for split in range(self.splits(run))
        ]

    def heads_of(self, kv_head: int) -> list[int]:
        """Query heads that share a KV head."""
        return [head for head in range(self.shape.num_q) if self.heads.kv_head(head) == kv_head]

    def partials_of(self, run: int, kv_head: int, split: int) -> list[int]:
        """Offsets of an instance's partials, in floats: one a slice, row and head, of PARTIAL_FLOATS."""
        s, num_rows, begin = self.shape, self.runs[run][0], self.batch.runs[run].row_begin
        rows = range(begin, begin + num_rows)
        slices = [head * s.slices + i for head in self.heads_of(kv_head) for i in range(s.slices)]
        return [((i * MAX_ROWS + row) * s.max_kv_splits + split) * PARTIAL_FLOATS for i in slices for row in rows]

    def appended_by(self, run: int, kv_head: int, split: int) -> list[int]:
        """Offsets in a cache, in elements, of the new positions inside an instance's split; each has head_dim elements."""
        s, (num_rows, slot, kv_len) = self.shape, self.runs[run]
        begin, end = self.split_bounds(run)[split : split + 2]
        found = []
        for position in range(max(begin, kv_len - num_rows), end):
            page = int(self.pages[slot, position // s.page_size])
            found.append(((page * s.num_kv + kv_head) * s.page_size + position % s.page_size) * s.head_dim)
        return found

    def cache(self, caches: torch.Tensor, run: int, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence in `caches`, [kv_len, head_dim]."""
        s, (_, slot, kv_len) = self.shape, self.runs[run]
        table = torch.from_numpy(self.pages[slot, : -(-kv_len // s.page_size)]).long()
        keys, values = (caches[i, table, kv_head].reshape(-1, s.head_dim)[:kv_len] for i in (0, 1))
        return keys, values

    def projected(self, run: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed and rotated q and k and plain v of a run's rows, [rows, heads, head_dim]."""
        s, (num_rows, _, kv_len) = self.shape, self.runs[run]
        row_begin = self.batch.runs[run].row_begin
        rows = self.qkv[row_begin : row_begin + num_rows, : s.qkv_cols].reshape(num_rows, -1, s.head_dim)
        q, k, v = rows.split([s.num_q, s.num_kv, s.num_kv], dim=1)
        if self.norms:
            q, k = (reference.rms_norm(x, w, 1e-6) for x, w in zip((q, k), self.norms, strict=True))
        table = self.rope[kv_len - num_rows : kv_len, None]
        return reference.apply_rope(q, table), reference.apply_rope(k, table), v

    def check_caches(self, caches: torch.Tensor) -> None:
        """AssertionError unless `caches`, as the launch left them, hold the new positions."""
        for run, (num_rows, _, _) in enumerate(self.runs):
            _, k, v = self.projected(run)
            for kv_head in range(self.shape.num_kv):
                keys, values = self.cache(caches, run, kv_head)
                where = f"run {run} KV head {kv_head} "
                want = k[:, kv_head]
                # Half a unit in the last place of bf16, and a little for float32.
                assert_close(where + "K", keys[-num_rows:].double(), want, want.abs() * 2**-8 * 1.01 + 1e-6)
                assert_close(where + "V", values[-num_rows:].double(), v[:, kv_head].bfloat16().double(), 0)

    def check_partials(self, parts: np.ndarray, caches: torch.Tensor, error: float) -> None:
        """`parts` are f32 [q head, slice, row, split, PARTIAL_FLOATS]; `error` is relative to the sum of the weights."""
        s = self.shape
        shaped = parts.reshape(s.num_q, s.slices, MAX_ROWS, s.max_kv_splits, PARTIAL_FLOATS)
        for run, kv_head, split in self.instances():
            num_rows, _, kv_len = self.runs[run]
            keys, values = self.cache(caches, run, kv_head)
            q, _, _ = self.projected(run)
            begin, end = self.split_bounds(run)[split : split + 2]
            for head in self.heads_of(kv_head):
                for i in range(num_rows):
                    inputs = (q[i, head], keys, values, kv_len - num_rows + i, begin, end, self.how)
                    maximum, total, sums = reference.partial_attention(*inputs)
                    got = shaped[head, :, self.batch.runs[run].row_begin + i, split]
                    where = f"head {head} run {run} row {i} split {split} of {self.splits(run)} "
                    assert_close(
                        where + "maximum",
                        got[:, 0],
                        np.full(s.slices, maximum),
                        error / 2 + SCORE_ROUNDING * abs(maximum),
                    )
                    assert_close(where + "sum", got[:, 1], np.full(s.slices, total), error * total)
                    acc = got[:, PARTIAL_HEADER_FLOATS:].reshape(-1)[: s.head_dim]
                    assert_close(where + "acc", acc, sums, error * total * 4)

    def fused_splits(self, fused_partials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-sum-exp [q head, split] and elements [q head, split, head_dim] of a batch-1 row's splits. `fused_partials` are raw
        bf16 [q head, split, FUSED_PARTIAL_HEADER + head_dim].
        """
        s = self.shape
        shaped = np.ascontiguousarray(
            fused_partials.reshape(s.num_q, -1, FUSED_PARTIAL_HEADER + s.head_dim)[:, : self.splits(0)]
        )
        return shaped.view(np.float32)[:, :, 0], floats(shaped[:, :, FUSED_PARTIAL_HEADER:].copy(), "bf16")

    def check_fused_partials(self, fused_partials: np.ndarray, caches: torch.Tensor, error: float) -> None:
        """Every split of a batch-1 row left the softmax over its positions times V, and the log-sum-exp of their scores."""
        logs, elements = self.fused_splits(fused_partials)
        kv_len, q = self.runs[0][2], self.projected(0)[0]
        bounds = self.split_bounds(0)
        for head in range(self.shape.num_q):
            keys, values = self.cache(caches, 0, self.heads.kv_head(head))
            for split in range(self.splits(0)):
                inputs = (q[0, head], keys, values, kv_len - 1, *bounds[split : split + 2], self.how)
                maximum, total, sums = reference.partial_attention(*inputs)
                where = f"fused partial of head {head} split {split} of {self.splits(0)} "
                assert_close(
                    where + "log-sum-exp ",
                    logs[head, split],
                    maximum + np.log(total),
                    error + SCORE_ROUNDING * abs(maximum),
                )
                want = sums / total
                assert_close(where, elements[head, split], want, ROUNDING["bf16"] * want.abs() + 5 * error)

    def combined(self, fused_partials: np.ndarray) -> np.ndarray:
        """The row that those splits combine to, float64 [num_q * head_dim]."""
        logs, elements = self.fused_splits(fused_partials)
        weights = np.exp(logs.astype(np.float64) - logs.max(axis=1, keepdims=True))
        combined = (elements * weights[:, :, None]).sum(axis=1) / weights.sum(axis=1)[:, None]
        return np.asarray(combined.reshape(-1))

    def check_combined(self, combined: np.ndarray, caches: torch.Tensor, error: float) -> None:
        """`combined`, [rows, num_q * head_dim] or wider, is attention without splits, rounded to bf16."""
        s = self.shape
        for run, (num_rows, _, kv_len) in enumerate(self.runs):
            q, _, _ = self.projected(run)
            for head in range(s.num_q):
                keys, values = self.cache(caches, run, self.heads.kv_head(head))
                for i in range(num_rows):
                    row = self.batch.runs[run].row_begin + i
                    want = reference.attention(q[i, head], keys, values, kv_len - num_rows + i, self.how)
                    tolerance = error + ROUNDING["bf16"] * (want.abs() + error)
                    where = f"head {head} row {row} (run {run}, {self.splits(run)} splits) column "
                    assert_close(where, combined[row, head * s.head_dim : (head + 1) * s.head_dim], want, tolerance)
