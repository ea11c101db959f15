"""Attention and merge of the host twin, all instances of a launch, against torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import reference
import torch
from arena import Arena, assert_close, make_batch, random_runs

from distmk.abi import MAX_ROWS, Batch, Space
from distmk.tasks import Attention, AttentionShape, Merge


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


class AttentionCase:
    """Inputs of one attention launch on one rank; `run` runs its instances and `check` compares all they wrote."""

    def __init__(
        self, rng: np.random.Generator, heads: Heads, head_dim: int, page_size: int, norms: bool, max_len: int
    ):
        self.rng, self.heads, self.head_dim = rng, heads, head_dim
        self.runs = random_runs(rng, max_len)
        self.batch = make_batch(self.runs, rng)
        max_pages = -(-max(kv_len for _, _, kv_len in self.runs) // page_size) + int(rng.integers(0, 3))
        num_pages = max_pages * len(self.runs) + 2
        workers, min_split, max_splits = (int(rng.integers(1, top)) for top in (12, 40, 9))
        self.shape = AttentionShape(
            heads.num_q, heads.num_kv, head_dim, heads.group, heads.q_begin, heads.kv_begin, page_size, max_pages,
            num_pages, max_splits, min_split, workers,
        )  # fmt: skip
        self.norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else None
        self.qkv = torch.randn(self.batch.num_rows, self.shape.qkv_cols + int(rng.integers(0, 6)))
        self.qkv[:, self.shape.qkv_cols :] = torch.nan  # rows lie further apart than they are long
        self.rope = reference.rope_table(max_len + MAX_ROWS, head_dim)
        self.arena = Arena(rng, num_bytes=1 << 22)
        self._make_caches()
        self._store()

    def _make_caches(self) -> None:
        """Old positions hold numbers, all others NaN; the pages of a sequence are scattered."""
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

    def _store(self) -> None:
        s, arena = self.shape, self.arena
        self.args = Attention.Args(eps=1e-6, num_positions=self.rope.shape[0], qkv_stride=self.qkv.shape[1])
        for name in ("num_q", "num_kv", "head_dim", "group", "q_begin", "kv_begin", "page_size", "max_pages"):
            setattr(self.args, name, getattr(s, name))
        for name in ("num_pages", "max_splits", "min_split", "num_workers"):
            setattr(self.args, name, getattr(s, name))
        self.args.qkv, self.args.rope = arena.store(self.qkv, Space.HEAP), arena.store(self.rope)
        self.args.k_cache, self.args.v_cache = arena.store(self.caches[0]), arena.store(self.caches[1])
        self.args.page_table, self.args.batch = arena.store(self.pages, Space.HEAP), arena.store(self.batch, Space.HEAP)
        self.args.part = arena.alloc(4 * s.num_q * s.part_cols)
        if self.norms:
            self.args.q_norm, self.args.k_norm = arena.store(self.norms[0]), arena.store(self.norms[1])

    def splits(self, kv_len: int) -> int:
        s = self.shape
        return reference.num_splits(len(self.runs), kv_len, s.num_kv, s.num_workers, s.min_split, s.max_splits)

    def instances(self) -> list[tuple[int, int, int]]:
        """(run, KV head, split) of every instance, in order."""
        return [
            (run, kv_head, split)
            for run, (_, _, kv_len) in enumerate(self.runs)
            for kv_head in range(self.shape.num_kv)
            for split in range(self.splits(kv_len))
        ]

    def _declare(self, run: int, kv_head: int, split: int) -> None:
        """What one instance may write: the parts of its heads and rows, and new positions inside its split."""
        s, (num_rows, slot, kv_len) = self.shape, self.runs[run]
        row_begin = self.batch.runs[run].row_begin
        for head in (h for h in range(s.num_q) if self.heads.kv_head(h) == kv_head):
            for row in range(row_begin, row_begin + num_rows):
                part = ((head * MAX_ROWS + row) * s.max_splits + split) * s.part_stride
                self.arena.output(self.args.part + 4 * part, 4 * s.part_stride)
        begin, end = reference.split_bounds(kv_len, self.splits(kv_len))[split : split + 2]
        for position in range(max(begin, kv_len - num_rows), end):
            page = int(self.pages[slot, position // s.page_size])
            at = ((page * s.num_kv + kv_head) * s.page_size + position % s.page_size) * s.head_dim
            for cache in (self.args.k_cache, self.args.v_cache):
                self.arena.output(cache + 2 * at, 2 * s.head_dim)

    def run(self) -> None:
        instances = self.instances()
        for index in self.rng.permutation(len(instances)):
            self._declare(*instances[index])
            self.arena.run(Attention, self.args, instance=int(index))

    def cache(self, run: int, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence as they are in memory now, [kv_len, head_dim]."""
        s, (_, slot, kv_len) = self.shape, self.runs[run]
        found = []
        for op in (self.args.k_cache, self.args.v_cache):
            raw = torch.from_numpy(self.arena.bytes_at(op, 2 * s.cache_cols).copy()).view(torch.bfloat16)
            pages = raw.view(s.num_pages, s.num_kv, s.page_size, s.head_dim)[:, kv_head]
            table = torch.from_numpy(self.pages[slot, : -(-kv_len // s.page_size)]).long()
            found.append(pages[table].reshape(-1, s.head_dim)[:kv_len])
        return found[0], found[1]

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

    def check_caches(self) -> None:
        for run, (num_rows, _, _) in enumerate(self.runs):
            _, k, v = self.projected(run)
            for kv_head in range(self.shape.num_kv):
                keys, values = self.cache(run, kv_head)
                where = f"run {run} KV head {kv_head} "
                want = k[:, kv_head]
                # Half a unit in the last place of bf16, and a little for float32.
                assert_close(where + "K", keys[-num_rows:].double(), want, want.abs() * 2**-8 * 1.01 + 1e-6)
                assert_close(where + "V", values[-num_rows:].double(), v[:, kv_head].bfloat16().double(), 0)

    def check_parts(self) -> None:
        s = self.shape
        parts = self.arena.f32(self.args.part, (s.num_q, MAX_ROWS, s.max_splits, s.part_stride))
        for run, kv_head, split in self.instances():
            num_rows, _, kv_len = self.runs[run]
            keys, values = self.cache(run, kv_head)
            q, _, _ = self.projected(run)
            begin, end = reference.split_bounds(kv_len, self.splits(kv_len))[split : split + 2]
            for head in (h for h in range(s.num_q) if self.heads.kv_head(h) == kv_head):
                for i in range(num_rows):
                    inputs = (q[i, head], keys, values, kv_len - num_rows + i, begin, end)
                    maximum, total, sums = reference.partial_attention(*inputs)
                    got = parts[head, self.batch.runs[run].row_begin + i, split]
                    where = f"head {head} run {run} row {i} split {split} of {self.splits(kv_len)} "
                    assert_close(where + "maximum", got[0], np.float64(maximum), 1e-5)
                    assert_close(where + "sum", got[1], np.float64(total), 2e-5 * total)
                    assert_close(where + "acc", got[2:], sums, 2e-5 * total * 4)

    def merge(self, tolerance: float = 2e-5) -> None:
        """Merge two groups of heads by two tasks and compare with attention that knows of no splits."""
        s = self.shape
        stride = s.num_q * s.head_dim + 5
        out = self.arena.alloc(4 * MAX_ROWS * stride)
        cut = int(self.rng.integers(0, s.num_q))
        for begin, end in ((0, cut), (cut, s.num_q)):
            args = Merge.Args(batch=self.args.batch, num_heads=end - begin, head_dim=s.head_dim, out_stride=stride)
            args.part, args.out = self.args.part + 4 * begin * s.part_cols, out + 4 * begin * s.head_dim
            args.max_splits, args.min_split = s.max_splits, s.min_split
            args.num_workers, args.num_kv = s.num_workers, s.num_kv
            self.arena.output(args.out, 4 * (end - begin) * s.head_dim, None, self.batch.num_rows, 4 * stride)
            self.arena.run(Merge, args)
        got = self.arena.f32(out, (MAX_ROWS, stride))
        for run, (num_rows, _, kv_len) in enumerate(self.runs):
            q, _, _ = self.projected(run)
            for head in range(s.num_q):
                keys, values = self.cache(run, self.heads.kv_head(head))
                for i in range(num_rows):
                    row = self.batch.runs[run].row_begin + i
                    want = reference.attention(q[i, head], keys, values, kv_len - num_rows + i)
                    where = f"head {head} row {row} (run {run}, {self.splits(kv_len)} splits) column "
                    assert_close(where, got[row, head * s.head_dim : (head + 1) * s.head_dim], want, tolerance)


def check(case: AttentionCase) -> None:
    print(case.shape, case.runs)
    case.run()
    case.check_caches()
    case.check_parts()
    case.merge()


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("norms", [False, True])
def test_attention(rng: np.random.Generator, head_dim: int, page_size: int, norms: bool) -> None:
    group = int(rng.integers(1, 9))
    q_begin, num_q = int(rng.integers(0, 9)), int(rng.integers(1, 9))
    check(AttentionCase(rng, Heads(num_q, group, q_begin), head_dim, page_size, norms, int(rng.choice([20, 150]))))


@pytest.mark.parametrize(
    "heads", [Heads(4, 3, 5), Heads(8, 8), Heads(9, 3), Heads(3, 1, 2), Heads(20, 20), Heads(1, 4, 3)]
)
def test_attention_of_uneven_heads(rng: np.random.Generator, heads: Heads) -> None:
    check(AttentionCase(rng, heads, 16, 4, True, 70))


def test_attention_of_a_long_sequence(rng: np.random.Generator) -> None:
    check(AttentionCase(rng, Heads(3, 3), 64, 16, False, 900))


def test_attention_survives_extreme_scores(rng: np.random.Generator) -> None:
    """Scores in the hundreds: only a softmax that subtracts the maximum survives them."""
    case = AttentionCase(rng, Heads(2, 2), 32, 8, False, 100)
    queries = slice(0, case.shape.num_q * case.head_dim)
    case.arena.f32(case.args.qkv, tuple(case.qkv.shape))[:, queries] *= 100
    case.qkv[:, queries] *= 100
    case.run()
    case.check_caches()
    case.merge(tolerance=5e-3)  # the rounding of a score grows with it


def test_batch_fits(rng: np.random.Generator) -> None:
    for _ in range(100):
        runs = random_runs(rng, 50)
        batch = make_batch(runs, rng)
        assert 1 <= batch.num_rows <= MAX_ROWS and len({slot for _, slot, _ in runs}) == len(runs)
        assert ctypes.sizeof(batch) == ctypes.sizeof(Batch)
