"""One attention launch of a rank, wherever it runs: its inputs, and what it and the merge behind it must leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from support import reference
from support.arrays import ROUNDING, assert_close, floats
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

Instance = tuple[int, int, int]  # run, KV head, split


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
        alone: bool = False,  # a single row, of which there may be more splits
        fused_partials: bool = False,  # a single row is lone, unless it has too many
    ):
        self.rng, self.heads, self.head_dim, self.fused_partials = rng, heads, head_dim, fused_partials
        # A single row that may be longer gets as many splits as a lone one has, of more than its warps hold at once.
        long = alone and max_len > COMBINE_WIDTH * POSITIONS_PER_PASS
        shortest = COMBINE_WIDTH * POSITIONS_PER_PASS if long else 1
        self.runs = [(1, int(rng.integers(MAX_ROWS)), int(rng.integers(shortest, max_len + 1)))] if alone else []
        self.runs = self.runs or random_runs(rng, max_len)
        self.batch = make_batch(self.runs, rng)
        max_pages = -(-max(kv_len for _, _, kv_len in self.runs) // page_size) + int(rng.integers(0, 3))
        num_pages = max_pages * len(self.runs) + 2
        workers, min_split, max_splits = (int(rng.integers(1, top)) for top in (12, 40, int(rng.choice([4, 9]))))
        if alone:
            workers, max_splits = heads.num_kv * int(rng.integers(1, 33)), int(rng.integers(1, rng.choice([3, 33])))
            min_split = int(rng.integers(1, rng.choice([3, 40])))
        if long:
            workers, max_splits, min_split = heads.num_kv * int(rng.integers(8, 33)), int(rng.integers(8, 33)), 64
        self.shape = AttentionShape(
            heads.num_q, heads.num_kv, head_dim, heads.group, heads.q_begin, heads.kv_begin, page_size, max_pages,
            num_pages, max_splits, min_split, workers,
        )  # fmt: skip
        self.norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else None
        self.qkv = torch.randn(self.batch.num_rows, self.shape.qkv_cols + 4 * int(rng.integers(0, 3)))
        self.qkv[:, self.shape.qkv_cols :] = torch.nan  # rows lie further apart than they are long
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
    def has_lone_row(self) -> bool:
        """Whether the batch is a row that those who multiply it merge."""
        return self.fused_partials and self.batch.num_rows == 1 and self.runs[0][2] <= self.shape.fused_combine_len

    def kept(self, caches: torch.Tensor, tiled: bool) -> torch.Tensor:
        """`caches` as a backend keeps them, or what it kept put right. A GPU, which has matrices in tiles, exchanges 16-byte
        pieces: in place i of position p of a page is piece i ^ (p % 8 ^ p % 2 * 4), where there are eights of both.
        """
        s = self.shape
        if not tiled or s.head_dim % 64 or s.page_size % 8:
            return caches
        place = torch.arange(s.page_size)[:, None]
        piece = torch.arange(s.head_dim // 8)[None] ^ (place % 8 ^ place % 2 * 4)
        return caches.unflatten(-1, (-1, 8))[..., place, piece, :].flatten(-2)

    def splits(self, run: int) -> int:
        s, kv_lens = self.shape, [kv_len for _, _, kv_len in self.runs]
        most = min(s.max_splits, COMBINE_WIDTH) if self.has_lone_row else s.max_splits
        return reference.num_splits(kv_lens, run, s.num_kv, s.num_workers, s.min_split, most)

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
        """Where the partial results of an instance begin, in floats, a slice of a head each; PARTIAL_FLOATS long."""
        s, num_rows, begin = self.shape, self.runs[run][0], self.batch.runs[run].row_begin
        rows = range(begin, begin + num_rows)
        slices = [head * s.slices + i for head in self.heads_of(kv_head) for i in range(s.slices)]
        return [((i * MAX_ROWS + row) * s.max_splits + split) * PARTIAL_FLOATS for i in slices for row in rows]

    def appended_by(self, run: int, kv_head: int, split: int) -> list[int]:
        """Where the new positions inside the split of an instance lie in a cache, in elements; each is head_dim long."""
        s, (num_rows, slot, kv_len) = self.shape, self.runs[run]
        begin, end = reference.split_bounds(kv_len, self.splits(run))[split : split + 2]
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
        """`caches`, as the launch left them, hold the new positions."""
        for run, (num_rows, _, _) in enumerate(self.runs):
            _, k, v = self.projected(run)
            for kv_head in range(self.shape.num_kv):
                keys, values = self.cache(caches, run, kv_head)
                where = f"run {run} KV head {kv_head} "
                want = k[:, kv_head]
                # Half a unit in the last place of bf16, and a little for float32.
                assert_close(where + "K", keys[-num_rows:].double(), want, want.abs() * 2**-8 * 1.01 + 1e-6)
                assert_close(where + "V", values[-num_rows:].double(), v[:, kv_head].bfloat16().double(), 0)

    def check_parts(self, parts: np.ndarray, caches: torch.Tensor, error: float = 2e-5) -> None:
        """`parts` are f32 [q head, slice, row, split, PARTIAL_FLOATS]; `error` is relative to the sum of the weights."""
        s = self.shape
        shaped = parts.reshape(s.num_q, s.slices, MAX_ROWS, s.max_splits, PARTIAL_FLOATS)
        for run, kv_head, split in self.instances():
            num_rows, _, kv_len = self.runs[run]
            keys, values = self.cache(caches, run, kv_head)
            q, _, _ = self.projected(run)
            begin, end = reference.split_bounds(kv_len, self.splits(run))[split : split + 2]
            for head in self.heads_of(kv_head):
                for i in range(num_rows):
                    inputs = (q[i, head], keys, values, kv_len - num_rows + i, begin, end)
                    maximum, total, sums = reference.partial_attention(*inputs)
                    got = shaped[head, :, self.batch.runs[run].row_begin + i, split]
                    where = f"head {head} run {run} row {i} split {split} of {self.splits(run)} "
                    assert_close(where + "maximum", got[:, 0], np.full(s.slices, maximum), error / 2)
                    assert_close(where + "sum", got[:, 1], np.full(s.slices, total), error * total)
                    acc = got[:, PARTIAL_HEADER_FLOATS:].reshape(-1)[: s.head_dim]
                    assert_close(where + "acc", acc, sums, error * total * 4)

    def lone_splits(self, fused_partials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of `lone`, raw bf16 [q head, split, FUSED_PARTIAL_HEADER + head_dim]: logs of weights [q head, split] and elements
        [q head, split, head_dim], of the splits that a single row has.
        """
        s = self.shape
        shaped = np.ascontiguousarray(
            fused_partials.reshape(s.num_q, -1, FUSED_PARTIAL_HEADER + s.head_dim)[:, : self.splits(0)]
        )
        return shaped.view(np.float32)[:, :, 0], floats(shaped[:, :, FUSED_PARTIAL_HEADER:].copy(), "bf16")

    def check_lone(self, fused_partials: np.ndarray, caches: torch.Tensor, error: float = 2e-5) -> None:
        """What splits have left of a single row: the result over the positions of each, and the log of its weight."""
        logs, elements = self.lone_splits(fused_partials)
        kv_len, q = self.runs[0][2], self.projected(0)[0]
        bounds = reference.split_bounds(kv_len, self.splits(0))
        for head in range(self.shape.num_q):
            keys, values = self.cache(caches, 0, self.heads.kv_head(head))
            for split in range(self.splits(0)):
                inputs = (q[0, head], keys, values, kv_len - 1, *bounds[split : split + 2])
                maximum, total, sums = reference.partial_attention(*inputs)
                where = f"lone head {head} split {split} of {self.splits(0)} "
                assert_close(where + "weight", logs[head, split], maximum + np.log(total), error)
                want = sums / total
                assert_close(where, elements[head, split], want, ROUNDING["bf16"] * want.abs() + 5 * error)

    def merged_lone(self, fused_partials: np.ndarray) -> np.ndarray:
        """The row that those splits are merged to, float64 [num_q * head_dim]."""
        logs, elements = self.lone_splits(fused_partials)
        weights = np.exp(logs.astype(np.float64) - logs.max(axis=1, keepdims=True))
        merged = (elements * weights[:, :, None]).sum(axis=1) / weights.sum(axis=1)[:, None]
        return np.asarray(merged.reshape(-1))

    def check_merged(self, merged: np.ndarray, caches: torch.Tensor, tolerance: float = 2e-5) -> None:
        """`merged`, [rows, num_q * head_dim] or wider, is attention that knows of no splits, rounded to bf16."""
        s = self.shape
        for run, (num_rows, _, kv_len) in enumerate(self.runs):
            q, _, _ = self.projected(run)
            for head in range(s.num_q):
                keys, values = self.cache(caches, run, self.heads.kv_head(head))
                for i in range(num_rows):
                    row = self.batch.runs[run].row_begin + i
                    want = reference.attention(q[i, head], keys, values, kv_len - num_rows + i)
                    near = tolerance + ROUNDING["bf16"] * (want.abs() + tolerance)
                    where = f"head {head} row {row} (run {run}, {self.splits(run)} splits) column "
                    assert_close(where, merged[row, head * s.head_dim : (head + 1) * s.head_dim], want, near)
