"""The scheduler step lays out prompts as rows on every rank, gives their slots pages, and ends the launch behind them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scheduler_step_job import KINDS, PAGE_SIZE, TOKEN, UNSET
from support.helpers import Runner
from support.machine import FAR, command, on_nodes, require, run_job

JOB = Path(__file__).with_name("scheduler_step_job.py")


RANKS = [
    on_nodes("host", 1, fast=True),
    on_nodes("host", 2),
    on_nodes("emulated", 1),
    on_nodes("emulated", 2, FAR),
    *(on_nodes("cuda", num_ranks) for num_ranks in (1, 2)),
]


@pytest.mark.parametrize(("backend", "num_ranks", "nodes"), RANKS)
def test_rows_of_prompts(
    runner: Runner, rng: np.random.Generator, backend: str, num_ranks: int, nodes: dict[str, str]
) -> None:
    """A prompt that fills a batch; then one that takes two iterations, with a second prompt beside its end."""
    require(backend, num_ranks)
    fits, long, short = (rng.integers(0, 1000, length).tolist() for length in (16, 20, 3))
    job = command(JOB, backend, json.dumps([([fits], 1), ([long, short], 1)]), "slabs", num_ranks=num_ranks)
    one, two = run_job(runner, job, **nodes).objects()
    assert one["tokens"] == [[0, TOKEN, 0]] and two["tokens"] == [[0, TOKEN, 1], [1, TOKEN, 1]]
    want = [[token, i, 0, int(i == 15)] for i, token in enumerate(fits)]
    for rank, found in enumerate(one["ranks"]):
        assert found["rows"] == want, f"rank {rank}"
        assert (found["runs"], found["num_reset_rows"]) == ([[0, 16, 0, 16]], 16), f"rank {rank}"
        check_pages(found["pages"], [16], KINDS["slabs"].num_pages)
    want = [[token, i, 0, int(i == 19)] for i, token in enumerate(long)][16:]
    want += [[token, i, 1, int(i == 2)] for i, token in enumerate(short)]
    for rank, found in enumerate(two["ranks"]):
        assert found["rows"] == want, f"rank {rank}"
        # 16 rows came before, and as many are to be reset.
        assert (found["runs"], found["num_reset_rows"]) == ([[0, 4, 0, 20], [4, 3, 1, 3]], 16), f"rank {rank}"
        check_pages(found["pages"], [20, 3], KINDS["slabs"].num_pages)
    for found in (*one["ranks"], *two["ranks"]):
        assert (found["stop"], found["rows at the end"]) == ([0, 1], 0)


@pytest.mark.parametrize(("backend", "num_ranks", "nodes"), RANKS)
def test_many_sequences(
    runner: Runner, rng: np.random.Generator, backend: str, num_ranks: int, nodes: dict[str, str]
) -> None:
    """More prompts than there are rows of a slab iteration, in one job iteration; and then a row for each of them."""
    require(backend, num_ranks)
    kind = KINDS["jobs"]
    lengths = [
        int(n) for n in rng.multinomial(kind.max_rows - kind.max_slots, [1 / kind.max_slots] * kind.max_slots) + 1
    ]
    prompts = [rng.integers(0, 1000, length).tolist() for length in lengths]
    job = command(JOB, backend, json.dumps([(prompts, 1), (prompts, 2)]), "jobs", num_ranks=num_ranks)
    one, two = run_job(runner, job, **nodes).objects()
    slots = range(kind.max_slots)
    assert one["tokens"] == [[slot, TOKEN, 0] for slot in slots]
    assert two["tokens"] == [[slot, TOKEN, iteration] for iteration in (0, 1) for slot in slots]
    ends = np.cumsum(lengths).tolist()
    for rank, found in enumerate(one["ranks"]):
        assert found["tokens"] == [token for prompt in prompts for token in prompt], f"rank {rank}"
        assert found["sampled"] == [end - 1 for end in ends], f"rank {rank}"
        assert found["rows"] == [[prompts[i][-1], lengths[i] - 1, i, 1] for i in slots], f"rank {rank}"
        assert found["runs"] == [[ends[i] - lengths[i], lengths[i], i, lengths[i]] for i in slots], f"rank {rank}"
        check_pages(found["pages"], lengths, kind.num_pages)
    for rank, found in enumerate(two["ranks"]):
        assert found["tokens"] == [TOKEN] * kind.max_slots and found["sampled"] == list(slots), f"rank {rank}"
        assert found["rows"] == [[TOKEN, lengths[i], i, 1] for i in slots], f"rank {rank}"
        assert found["runs"] == [[i, 1, i, lengths[i] + 1] for i in slots], f"rank {rank}"
        check_pages(found["pages"], [length + 1 for length in lengths], kind.num_pages)
    for found in (*one["ranks"], *two["ranks"]):
        assert (found["stop"], found["rows at the end"]) == ([0, 1], 0)


def check_pages(pages: list[list[int]], lengths: list[int], num_pages: int) -> None:
    """Every slot has pages of its own for all its positions, and nothing else was put."""
    counts = [-(-length // PAGE_SIZE) for length in lengths] + [0] * (len(pages) - len(lengths))
    used = [page for slot, count in zip(pages, counts, strict=True) for page in slot[:count]]
    assert len(set(used)) == len(used) and set(used) <= set(range(num_pages)), pages
    assert {page for slot, count in zip(pages, counts, strict=True) for page in slot[count:]} == {UNSET}, pages
