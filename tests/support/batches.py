"""Batch metadata as the scheduler step lays it out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distmk.abi import MAX_ROWS, Batch, BatchRow, BatchRun, RowSample


def make_batch(runs: Iterable[tuple[int, int, int]], rng: np.random.Generator, vocabulary: int = 1000) -> Batch:
    """A batch of runs (rows, slot, kv_len after this iteration); the last row of a run may be sampled."""
    batch = Batch()
    for num_rows, slot, kv_len in runs:
        batch.runs[batch.num_runs] = BatchRun(batch.num_rows, num_rows, slot, kv_len)
        batch.num_runs += 1
        for i in range(num_rows):
            samples = i == num_rows - 1 and rng.random() < 0.7
            sample = int(rng.integers(RowSample.GREEDY, RowSample.SCORE + 1)) if samples else RowSample.NONE
            token = int(rng.integers(vocabulary))
            batch.rows[batch.num_rows] = BatchRow(token, kv_len - num_rows + i, slot, sample)
            batch.num_rows += 1
    batch.num_reset_rows = batch.num_rows
    return batch


def decode_batch(num_rows: int, rng: np.random.Generator, vocabulary: int = 1000) -> Batch:
    """A batch of one row for each of `num_rows` sequences."""
    return make_batch([(1, slot, int(rng.integers(1, 50))) for slot in range(num_rows)], rng, vocabulary)


def random_runs(rng: np.random.Generator, max_len: int) -> list[tuple[int, int, int]]:
    """A mix of decode rows and prompt chunks, each of another slot, of at most MAX_ROWS rows together."""
    runs, left = [], MAX_ROWS
    for slot in rng.permutation(MAX_ROWS)[: int(rng.integers(1, 7))]:
        if not left:
            break
        rows = 1 if rng.random() < 0.5 else int(rng.integers(1, left + 1))
        runs.append((rows, int(slot), int(rng.integers(rows, max(rows, max_len) + 1))))
        left -= rows
    return runs
