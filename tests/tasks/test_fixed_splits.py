"""Fixed splits: a row's attention, in splits and combined, has the same bits alone, in company and in other chunks."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.batches import make_batch
from support.machine import on, require
from support.sampling_board import write

import distmk
from distmk.abi import MAX_ROWS, PARTIAL_FLOATS, Batch, LaunchKind, Space
from distmk.tasks import Attention, AttentionShape, Combine
from distmk.tasks.splits import KV_TILE

pytestmark = pytest.mark.timeout(200)
HEAD_DIM, PAGE_SIZE, SPLIT_LEN, MAX_SPLITS, MAX_LEN = 64, 16, 64, 4, 256
SHAPE = AttentionShape(
    num_q=4, num_kv=2, head_dim=HEAD_DIM, group=2, q_begin=0, kv_begin=0, page_size=PAGE_SIZE,
    max_pages=MAX_LEN // PAGE_SIZE, num_pages=3 * MAX_LEN // PAGE_SIZE, max_kv_splits=MAX_SPLITS, min_kv_split_len=SPLIT_LEN,
    num_workers=4, fixed_splits=True,
)  # fmt: skip
Runs = list[tuple[int, int, int]]  # rows, slot, positions after the iteration
Position = tuple[int, int]  # slot, position


class Rows:
    """Attention of one batch after the other, over sequences whose keys and values are the same in all of them."""

    def __init__(self, rng: np.random.Generator, backend: str, batches: list[Runs]) -> None:
        self.batches = batches
        graph = self.graph = distmk.Graph(1, 4)
        self.caches = [
            graph.buffer(name, SHAPE.cache_cols, dtype="bf16", space=Space.LOCAL) for name in ("k_cache", "v_cache")
        ]
        self.pages = graph.buffer("pages", MAX_ROWS * SHAPE.max_pages, dtype="i32")
        rope = graph.constant("rope", 0, reference.rope_table(MAX_LEN, HEAD_DIM).numpy())
        self.qkv, self.batch, self.partials, self.out = [], [], [], []
        launch = LaunchKind.MASSIVE if backend == "host" else LaunchKind.SPREAD
        for i in range(len(batches)):
            self.qkv.append(graph.buffer(f"qkv{i}", SHAPE.qkv_cols, rows=MAX_ROWS))
            self.batch.append(graph.buffer(f"batch{i}", ctypes.sizeof(Batch), dtype="u8"))
            self.partials.append(graph.buffer(f"partials{i}", SHAPE.num_partials))
            self.out.append(graph.buffer(f"out{i}", SHAPE.num_q * HEAD_DIM, rows=MAX_ROWS, dtype="bf16"))
            common: dict[str, Any] = {"shape": SHAPE, "batch": self.batch[i].at(0), "partials": self.partials[i].at(0)}
            k_cache, v_cache = (cache.at(0) for cache in self.caches)
            graph.add(
                Attention(
                    0, f"attention {i}", launch=launch, qkv=self.qkv[i].at(0), k_cache=k_cache, v_cache=v_cache,
                    page_table=self.pages.at(0), rope=rope, **common,
                )
            )  # fmt: skip
            slices = SHAPE.num_q * SHAPE.slices
            graph.add(Combine(0, f"combine {i}", slices=(0, slices), out=self.out[i].at(0), **common))
        self.projected = rng.normal(0, 1.5, (3, MAX_LEN, SHAPE.qkv_cols)).astype(np.float32)  # by slot and position

    def run(self, session: distmk.Session, rng: np.random.Generator) -> list[dict[Position, tuple[bytes, bytes]]]:
        """Of every batch, by slot and position of the row: the bits of its partials in all splits, and of its output."""
        pages = np.zeros((MAX_ROWS, SHAPE.max_pages), np.int32)
        pages[:3] = rng.permutation(SHAPE.num_pages).reshape(3, -1)
        write(session, self.pages, pages.reshape(1, -1))
        for cache in self.caches:
            values = torch.from_numpy(rng.normal(0, 1.5, SHAPE.cache_cols).astype(np.float32)).bfloat16()
            write(session, cache, values.view(torch.int16).numpy().reshape(1, -1))
        for runs, qkv, batch in zip(self.batches, self.qkv, self.batch, strict=True):
            rows = np.full((MAX_ROWS, SHAPE.qkv_cols), np.nan, np.float32)
            for row, (slot, position) in enumerate(positions_of(runs)):
                rows[row] = self.projected[slot, position]
            write(session, qkv, rows)
            write(session, batch, np.frombuffer(make_batch(runs, rng), np.uint8))
        session.run()
        return [self._read(session, i) for i in range(len(self.batches))]

    def _read(self, session: distmk.Session, index: int) -> dict[Position, tuple[bytes, bytes]]:
        partials = np.asarray(session.view(self.partials[index])).reshape(-1, MAX_ROWS, MAX_SPLITS, PARTIAL_FLOATS)
        out, found = np.asarray(session.view(self.out[index])), {}
        for row, (slot, position) in enumerate(positions_of(self.batches[index])):
            seen = partials[:, row, : position // SPLIT_LEN + 1]
            found[slot, position] = (seen.tobytes(), out[row].tobytes())
        return found


def positions_of(runs: Runs) -> list[Position]:
    """Slot and position of every row."""
    return [(slot, kv_len - num_rows + i) for num_rows, slot, kv_len in runs for i in range(num_rows)]


def random_batches(rng: np.random.Generator) -> list[Runs]:
    """A full batch of three chunks; its rows again in other chunks and company; then each alone."""
    counts = (4, 5, 7)
    # The last rows of a chunk see one tile more than the first ones.
    ends = [SPLIT_LEN * int(split) + 3 * KV_TILE + 2 for split in rng.permutation(MAX_SPLITS)[: len(counts)]]
    chunks = list(zip(counts, range(3), ends, strict=True))
    halves = [
        (end - begin, slot, kv_len - num_rows + end)
        for num_rows, slot, kv_len in chunks
        for begin, end in pairwise((0, num_rows // 2, num_rows))
    ]
    alone = [[(1, slot, position + 1)] for slot, position in positions_of(chunks)]
    return [chunks, [halves[0], halves[3]], [halves[1], halves[2], halves[4]], [halves[5]], *alone]


@pytest.mark.parametrize("backend", [on("host"), on("emulated"), on("cuda")])
def test_company_changes_no_bit(rng: np.random.Generator, backend: str) -> None:
    require(backend)
    rows = Rows(rng, backend, random_batches(rng))
    with distmk.connect(1) as bootstrap, distmk.Session(rows.graph, bootstrap, backend=backend) as session:
        first, *others = rows.run(session, rng)
    assert len(first) == MAX_ROWS and sum(map(len, others)) == 2 * MAX_ROWS
    for runs, found in zip(rows.batches[1:], others, strict=True):
        for position, bits in found.items():
            assert bits[0] == first[position][0], f"partials of {position} in {runs}, not in {rows.batches[0]}"
            assert bits[1] == first[position][1], f"output of {position} in {runs}, not in {rows.batches[0]}"
