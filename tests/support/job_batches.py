"""Batch metadata of job iterations, as the scheduler step lays it out."""

from __future__ import annotations

import numpy as np

from distmk.abi import MAX_BUCKET_ROWS, MAX_SEQUENCES, BatchRow, BatchRun, JobBatch, RowSample


def job_runs(rng: np.random.Generator, num_rows: int, max_len: int) -> list[tuple[int, int, int]]:
    """(rows, slot, kv_len) of chunks of prompts and decode rows, each of another slot, with `num_rows` rows together."""
    num_runs = int(rng.integers(1, min(num_rows, MAX_SEQUENCES) + 1))
    cuts = np.sort(rng.permutation(num_rows - 1)[: num_runs - 1] + 1)
    sizes = np.diff([0, *cuts, num_rows])
    return [
        (int(size), int(slot), int(size + rng.integers(max(max_len - size, 0) + 1)))
        for size, slot in zip(sizes, rng.permutation(MAX_SEQUENCES)[:num_runs], strict=True)
    ]


def make_job_batch(
    rng: np.random.Generator,
    num_rows: int,
    max_len: int = 2 * MAX_BUCKET_ROWS,
    first_token: int = 0,
    num_tokens: int = 1000,
    runs: list[tuple[int, int, int]] | None = None,
) -> JobBatch:
    """A batch of `num_rows` rows of random tokens, in `runs` (random if None); the last row of a run may be sampled."""
    jobs = JobBatch()
    jobs.batch.num_job_rows = num_rows
    row = 0
    for size, slot, kv_len in job_runs(rng, num_rows, max_len) if runs is None else runs:
        jobs.runs[jobs.batch.num_job_runs] = BatchRun(row, size, slot, kv_len)
        jobs.batch.num_job_runs += 1
        row += size
        if rng.random() < 0.7:
            sampled = jobs.batch.num_rows
            jobs.sampled[sampled] = row - 1
            jobs.rows[sampled] = BatchRow(0, kv_len - 1, slot, int(RowSample.GREEDY))
            jobs.batch.num_rows += 1
    jobs.tokens[:num_rows] = [first_token + int(token) for token in rng.integers(0, num_tokens, num_rows)]
    return jobs
