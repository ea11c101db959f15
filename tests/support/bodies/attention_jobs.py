"""Cases of the append of a job iteration and the attention behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from support import reference
from support.bodies.attention_inputs import PLAIN, Heads
from support.bodies.board import Board

from distmk.abi import (
    ACTIVATION_BLOCK_COLS,
    MAX_BUCKET_ROWS,
    MAX_SEQUENCES,
    ROW_SHARE_FLOATS,
    ActivationLayout,
    BatchRun,
    JobBatch,
    Space,
)
from distmk.graph.regions import Region
from distmk.tasks import AppendKv, AttentionJobs, AttentionShape
from distmk.tasks.activations import activation_cols
from distmk.tasks.splits import ANY_LENGTH
from distmk.testing.arrays import ROUNDING, assert_close
from distmk.testing.memory import Memory

EPS = 1e-6
Runs = list[tuple[int, int, int]]  # rows, slot, positions after this iteration


def random_job_runs(rng: np.random.Generator, max_len: int, max_rows: int = MAX_BUCKET_ROWS) -> Runs:
    """Single rows, and chunks of prompts, some of which begin in the middle of a long sequence."""
    runs, left = [], max_rows
    for slot in rng.permutation(MAX_SEQUENCES)[: int(rng.integers(1, 7))]:
        if not left:
            break
        rows = int(rng.choice([1, rng.integers(1, 40), rng.integers(1, max_len + 1)]))
        rows = min(rows, left, max_len)
        runs.append((rows, int(slot), int(rng.choice([rows, rng.integers(rows, max_len + 1)]))))
        left -= rows
    return runs


def random_decoding_runs(rng: np.random.Generator, max_len: int, group: int) -> Runs:
    """Rows of decoding sequences, the longest and the shortest among them, around short chunks and one of a prompt."""
    rows = [1] * int(rng.integers(4, 9))
    rows += [int(rng.integers(1, 18 // group + 2)) for _ in range(int(rng.integers(0, 3)))]
    lengths = [max_len, 1, *rng.integers(1, max_len + 1, len(rows) - 2)]
    rows.append(int(rng.integers(1, min(max_len, MAX_BUCKET_ROWS // 2) + 1)))
    lengths.append(rows[-1])
    slots = rng.permutation(MAX_SEQUENCES)[: len(rows)]
    return [(n, int(slot), max(n, int(length))) for n, slot, length in zip(rows, slots, lengths, strict=True)]


def random_long_runs(rng: np.random.Generator, max_len: int, group: int) -> Runs:
    """Sequences with few rows, one of them much longer than the others, and no chunk of a prompt."""
    rows = [int(rng.integers(1, 16 // group + 1)) for _ in range(int(rng.integers(1, 7)))]
    lengths = [max_len, *rng.integers(1, max_len // 4, len(rows) - 1)]
    slots = rng.permutation(MAX_SEQUENCES)[: len(rows)]
    runs = [(n, int(slot), max(n, int(length))) for n, slot, length in zip(rows, slots, lengths, strict=True)]
    return [runs[i] for i in rng.permutation(len(runs))]


def job_batch_of(runs: Runs) -> JobBatch:
    """Without sampled rows and tokens."""
    jobs = JobBatch()
    for rows, slot, kv_len in runs:
        jobs.runs[jobs.batch.num_job_runs] = BatchRun(jobs.batch.num_job_rows, rows, slot, kv_len)
        jobs.batch.num_job_runs += 1
        jobs.batch.num_job_rows += rows
    return jobs


def activation_offsets(num_rows: int, num_cols: int, tiled: int) -> np.ndarray:
    """Where the elements [num_rows, num_cols] of activations are (distmk/tasks/activations.py). tiled: the layout."""
    row, col = np.arange(num_rows)[:, None], np.arange(num_cols)[None]
    if not tiled:
        return row * num_cols + col
    if tiled == ActivationLayout.LANE_TILES:
        col = col // 32 * 32 + np.arange(32).reshape(4, 4, 2).swapaxes(0, 1).reshape(-1)[col % 32]
    chunk = col % ACTIVATION_BLOCK_COLS // 8 ^ row % 8
    return (col // ACTIVATION_BLOCK_COLS * MAX_BUCKET_ROWS + row) * ACTIVATION_BLOCK_COLS + 8 * chunk + col % 8


class AttentionJobsCase:
    """An append and the attention behind it, with pages in random order.

    Behind that comes attention of another window to the same rows, as in models whose layers differ.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        heads: Heads,
        head_dim: int,
        page_size: int,
        norms: bool,
        runs: Runs,
        tiled: bool,
        how: reference.Scoring,
    ) -> None:
        self.board, self.rank, self.heads, self.runs, self.tiled = board, rank, heads, runs, tiled
        self.how = how
        longest = max(kv_len for _, _, kv_len in runs)
        self.other = reference.Scoring(int(board.rng.integers(1, longest // 2 + 2)), how.scores)
        rng = board.rng
        max_pages = -(-longest // page_size) + int(rng.integers(0, 3))
        num_pages = sum(-(-kv_len // page_size) for _, _, kv_len in runs) + 2
        self.shape = AttentionShape(
            heads.num_q, heads.num_kv, head_dim, heads.group, heads.q_begin, heads.kv_begin, page_size, max_pages,
            num_pages, 1, 64, 1, MAX_SEQUENCES, how.window or ANY_LENGTH, how.scores,
        )  # fmt: skip
        self.num_rows = sum(rows for rows, _, _ in runs)
        self.qkv = torch.randn(self.num_rows, self.shape.qkv_cols).bfloat16()
        self.norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else None
        self.rope = reference.rope_table(longest + 3, head_dim)
        self._make_caches()
        self._add(f"{self.shape} {runs} norms={norms} tiled={tiled}")

    def _make_caches(self) -> None:
        """Old positions hold numbers, all others NaN."""
        s, rng = self.shape, self.board.rng
        self.pages = np.full((s.num_slots, s.max_pages), -1, dtype=np.int32)
        free = rng.permutation(s.num_pages)
        self.caches = torch.full((2, s.num_pages, s.num_kv, s.page_size, s.head_dim), torch.nan).bfloat16()
        for num_rows, slot, kv_len in self.runs:
            used = -(-kv_len // s.page_size)
            self.pages[slot, :used], free = free[:used], free[used:]
            old = torch.arange(kv_len - num_rows)
            page, inside = torch.from_numpy(self.pages[slot]).long()[old // s.page_size], old % s.page_size
            self.caches[:, page, :, inside] = torch.randn(len(old), 2, s.num_kv, s.head_dim).bfloat16()

    def _aligned(self, cols: int) -> Region:
        """Columns of a new bf16 buffer of MAX_BUCKET_ROWS rows, at a multiple of 16 bytes."""
        before, after = (8 * int(pad) for pad in self.board.rng.integers(0, 3, 2))
        return self.board.buffer(before + cols + after, MAX_BUCKET_ROWS, "bf16").at(self.rank, before, before + cols)

    def _shares(self) -> Region | None:
        """Partials of every worker, mostly."""
        if not self.board.gpu_layout or self.board.rng.random() < 0.2:
            return None
        num_workers = self.board.num_workers
        shares = self.board.buffer(ROW_SHARE_FLOATS, num_workers, space=Space.LOCAL).at(self.rank)
        return self.board.writable(self.board.fill(shares, torch.zeros(num_workers, ROW_SHARE_FLOATS)), num_workers)

    def _out(self) -> Region:
        """Activations of the query columns, writable for the rows there are."""
        q_cols = self.shape.num_q * self.shape.head_dim
        out = self.board.buffer(activation_cols(q_cols, self.tiled), 1, "bf16").at(self.rank)
        for block in range(-(-q_cols // ACTIVATION_BLOCK_COLS)) if self.tiled else (0,):
            begin = block * MAX_BUCKET_ROWS * ACTIVATION_BLOCK_COLS
            end = begin + self.num_rows * (ACTIVATION_BLOCK_COLS if self.tiled else q_cols)
            self.board.writable(out.buffer.at(self.rank, begin, end))
        return out

    def _add(self, what: str) -> None:
        s, board, rank = self.shape, self.board, self.rank
        q_cols = s.num_q * s.head_dim
        q = board.writable(self._aligned(q_cols), self.num_rows)
        stored = self._stored(self.caches)
        k_cache, v_cache = (board.filled(rank, cache, "bf16", space=Space.LOCAL) for cache in stored)
        for begin in self._appended():
            for cache in (k_cache, v_cache):
                board.writable(cache.buffer.at(rank, begin, begin + s.head_dim))
        q_norm, k_norm = (board.vector(rank, norm) for norm in self.norms or (None, None))
        both = {
            "shape": s,
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": board.filled(rank, self.pages, "i32", space=Space.HEAP),
            "batch": board.filled(rank, job_batch_of(self.runs), "u8", space=Space.HEAP),
        }
        board.graph.add(
            AppendKv(
                rank,
                f"append {what}",
                qkv=board.fill(self._aligned(s.qkv_cols), self.qkv),
                rope=board.graph.constant(board.name("rope"), rank, self.rope.numpy()),
                q_norm=q_norm,
                k_norm=k_norm,
                eps=EPS,
                **both,
            )
        )
        shares, outs = self._shares(), [self._out(), self._out()]
        for out, how in zip(outs, (self.how, self.other), strict=True):
            task = both | {"shape": replace(s, window=how.window or ANY_LENGTH)}
            what_of = f"attention of window {how.window} {what}"
            board.graph.add(AttentionJobs(rank, what_of, out=out, shares=shares, tiled=self.tiled, **task))

        def read(memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
            raw = np.stack([memory[cache.buffer].reshape(-1) for cache in (k_cache, v_cache)])
            caches = torch.from_numpy(raw).view(torch.bfloat16).view(self.caches.shape)
            queries = torch.from_numpy(memory[q.buffer][: self.num_rows].copy()).view(torch.bfloat16)
            return queries[:, q.begin : q.end].unflatten(1, (s.num_q, s.head_dim)).double(), self._stored(caches)

        def check_attention(memory: Memory) -> None:
            for out, how in zip(outs, (self.how, self.other), strict=True):
                raw = torch.from_numpy(memory[out.buffer].reshape(-1).copy()).view(torch.bfloat16)
                got = raw[torch.from_numpy(activation_offsets(self.num_rows, q_cols, self.tiled))].double()
                self.check_attention(how, got.unflatten(1, (s.num_q, s.head_dim)), *read(memory))

        board.expect(rank, "append_kv", what, lambda memory: self.check_append(*read(memory)))
        board.expect(rank, "attention_jobs", what, check_attention)

    def _stored(self, caches: torch.Tensor) -> torch.Tensor:
        """`caches` as the backend keeps them, or from there back (AttentionInputs.swizzled)."""
        s = self.shape
        if not self.board.gpu_layout or s.head_dim % 64 or s.page_size % 8:
            return caches
        position = torch.arange(s.page_size)[:, None]
        chunk = torch.arange(s.head_dim // 8)[None] ^ (position % 8 ^ position % 2 * 4)
        return caches.unflatten(-1, (-1, 8))[..., position, chunk, :].flatten(-2)

    def _appended(self) -> list[int]:
        """Offsets of the new positions in a cache, in elements."""
        s = self.shape
        return [
            ((int(self.pages[slot, at // s.page_size]) * s.num_kv + head) * s.page_size + at % s.page_size) * s.head_dim
            for num_rows, slot, kv_len in self.runs
            for at in range(kv_len - num_rows, kv_len)
            for head in range(s.num_kv)
        ]

    def _cache(self, caches: torch.Tensor, run: int) -> torch.Tensor:
        """K and V of a run's sequence, [2, kv_len, KV heads, head_dim]."""
        s, (_, slot, kv_len) = self.shape, self.runs[run]
        table = torch.from_numpy(self.pages[slot, : -(-kv_len // s.page_size)]).long()
        return caches[:, table].transpose(2, 3).flatten(1, 2)[:, :kv_len].double()

    def _rows(self, run: int) -> slice:
        begin = sum(rows for rows, _, _ in self.runs[:run])
        return slice(begin, begin + self.runs[run][0])

    def check_append(self, queries: torch.Tensor, caches: torch.Tensor) -> None:
        """AssertionError unless queries and new positions are normalized, rotated and rounded."""
        s = self.shape
        for run, (num_rows, _, kv_len) in enumerate(self.runs):
            heads = self.qkv[self._rows(run)].double().unflatten(1, (-1, s.head_dim))
            q, k, v = heads.split([s.num_q, s.num_kv, s.num_kv], dim=1)
            if self.norms:
                q, k = (reference.rms_norm(x, norm, EPS) for x, norm in zip((q, k), self.norms, strict=True))
            q, k = (reference.apply_rope(x, self.rope[kv_len - num_rows : kv_len, None]) for x in (q, k))
            keys, values = self._cache(caches, run)[:, -num_rows:]
            for name, got, want in (("q", queries[self._rows(run)], q), ("k", keys, k)):
                assert_close(f"run {run} {name} ", got, want, want.abs() * ROUNDING["bf16"] * 1.01 + 1e-6)
            assert_close(f"run {run} v ", values, v, 0)

    def check_attention(
        self, how: reference.Scoring, got: torch.Tensor, queries: torch.Tensor, caches: torch.Tensor
    ) -> None:
        """`got` [rows, heads, head_dim]; weights may be rounded to bf16 before they multiply the values."""
        s, rounding = self.shape, ROUNDING["bf16"] * 1.01
        for run, (num_rows, _, kv_len) in enumerate(self.runs):
            keys, values = self._cache(caches, run)
            distance = torch.arange(kv_len - num_rows, kv_len)[:, None] - torch.arange(kv_len)[None]
            hidden = (distance < 0) | (distance >= (how.window or ANY_LENGTH))
            for head in range(s.num_q):
                kv_head, rows = self.heads.kv_head(head), self._rows(run)
                scores = how.score(queries[rows, head], keys[:, kv_head])
                weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=1)
                want = weights @ values[:, kv_head]
                tolerance = rounding * (weights @ values[:, kv_head].abs() + want.abs()) + 1e-5
                assert_close(f"run {run} head {head} ", got[rows, head], want, tolerance)


def attention_jobs(
    board: Board,
    rank: int,
    heads: Heads,
    head_dim: int,
    page_size: int,
    norms: bool,
    runs: Runs,
    how: reference.Scoring = PLAIN,
) -> None:
    tiled = board.gpu_layout and bool(board.rng.random() < 0.8)
    AttentionJobsCase(board, rank, heads, head_dim, page_size, norms, runs, tiled, how)
