"""Attention and merge of the host twin, all instances of a launch, against torch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.arena import Arena
from support.attention_inputs import AttentionInputs, Heads, Instance
from support.batches import make_batch, random_runs

from distmk.abi import MAX_ROWS, PARTIAL_FLOATS, Batch, Space
from distmk.tasks import Attention, Combine


class AttentionCase:
    """One attention launch in an arena; `run` runs its instances and `check` compares all they wrote."""

    def __init__(
        self, rng: np.random.Generator, heads: Heads, head_dim: int, page_size: int, norms: bool, max_len: int
    ):
        self.inputs = AttentionInputs(rng, heads, head_dim, page_size, norms, max_len)
        self.arena = Arena(rng, num_bytes=1 << 22)
        self._store()

    def _store(self) -> None:
        i, s, arena = self.inputs, self.inputs.shape, self.arena
        self.args = Attention.Args(eps=1e-6, num_positions=i.rope.shape[0], qkv_stride=i.qkv.shape[1])
        for name in ("num_q", "num_kv", "head_dim", "group", "q_begin", "kv_begin", "page_size", "max_pages"):
            setattr(self.args, name, getattr(s, name))
        for name in ("num_pages", "max_splits", "min_split", "split_budget"):
            setattr(self.args, name, getattr(s, name))
        self.args.qkv, self.args.rope = arena.store(i.qkv, Space.HEAP), arena.store(i.rope)
        self.args.k_cache, self.args.v_cache = arena.store(i.caches[0]), arena.store(i.caches[1])
        self.args.page_table, self.args.batch = arena.store(i.pages, Space.HEAP), arena.store(i.batch, Space.HEAP)
        self.args.partials = arena.alloc(4 * s.num_partials)
        if i.norms:
            self.args.q_norm, self.args.k_norm = arena.store(i.norms[0]), arena.store(i.norms[1])

    def _declare(self, instance: Instance) -> None:
        """What one instance may write: the parts of its heads and rows, and new positions inside its split."""
        s = self.inputs.shape
        for part in self.inputs.partials_of(*instance):
            self.arena.output(self.args.partials + 4 * part, 4 * PARTIAL_FLOATS)
        for at in self.inputs.appended_by(*instance):
            for cache in (self.args.k_cache, self.args.v_cache):
                self.arena.output(cache + 2 * at, 2 * s.head_dim)

    def run(self) -> None:
        instances = self.inputs.instances()
        for index in self.inputs.rng.permutation(len(instances)):
            self._declare(instances[index])
            self.arena.run(Attention, self.args, instance=int(index))

    def caches(self) -> torch.Tensor:
        """Both caches as they are in memory now."""
        i = self.inputs
        raw = [self.arena.bytes_at(op, 2 * i.shape.cache_cols).copy() for op in (self.args.k_cache, self.args.v_cache)]
        return torch.from_numpy(np.stack(raw)).view(torch.bfloat16).view(i.caches.shape)

    def check_parts(self) -> None:
        s = self.inputs.shape
        self.inputs.check_parts(self.arena.f32(self.args.partials, (s.num_partials,)), self.caches())

    def merge(self, tolerance: float = 2e-5) -> None:
        """Combine by two tasks: slices of up to 32 elements, up to a place that may lie inside a head."""
        s = self.inputs.shape
        stride, slices = s.num_q * s.head_dim + 5, -(-s.head_dim // 32)
        out = self.arena.alloc(2 * MAX_ROWS * stride)
        cut, end = int(self.inputs.rng.integers(0, s.num_q * slices)), s.num_q * slices
        for first, last in ((0, cut), (cut, end)):
            if first == last:
                continue
            head, column = first // slices, first % slices * 32
            width = last // slices * s.head_dim + last % slices * 32 - head * s.head_dim - column
            args = Combine.Args(batch=self.args.batch, head_dim=s.head_dim, out_stride=stride)
            args.first_slice, args.num_slices = first % slices, last - first
            args.partials, args.out = self.args.partials + 4 * first * s.partial_cols, out + 2 * head * s.head_dim
            args.max_splits, args.min_split, args.split_budget = s.max_splits, s.min_split, s.split_budget
            self.arena.output(args.out + 2 * column, 2 * width, None, self.inputs.batch.num_rows, 2 * stride)
            self.arena.run(Combine, args)
        self.inputs.check_merged(self.arena.floats(out, (MAX_ROWS, stride), "bf16"), self.caches(), tolerance)


def check(case: AttentionCase) -> None:
    print(case.inputs.shape, case.inputs.runs)
    case.run()
    case.inputs.check_caches(case.caches())
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
    qkv = case.inputs.qkv
    queries = slice(0, case.inputs.shape.num_q * case.inputs.head_dim)
    case.arena.f32(case.args.qkv, tuple(qkv.shape))[:, queries] *= 100
    qkv[:, queries] *= 100
    case.run()
    case.inputs.check_caches(case.caches())
    case.merge(tolerance=5e-3)  # the rounding of a score grows with it


def test_batch_fits(rng: np.random.Generator) -> None:
    for _ in range(100):
        runs = random_runs(rng, 50)
        batch = make_batch(runs, rng)
        assert 1 <= batch.num_rows <= MAX_ROWS and len({slot for _, slot, _ in runs}) == len(runs)
        assert ctypes.sizeof(batch) == ctypes.sizeof(Batch)
