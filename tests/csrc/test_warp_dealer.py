"""How the warps of a worker share its row jobs of attention: none has much more to do than it must."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.ranks_in_process import build_in_one

pytestmark = pytest.mark.timeout(120)

NUM_WARPS = 8
Dealt = tuple[int, list[tuple[int, int]]]  # most tiles of a warp; each job's first warp and number of pieces


def deal(cases: list[list[int]]) -> list[Dealt]:
    source = Path(__file__).with_name("deal_jobs.cpp")
    tool = build_in_one("deal_jobs", ["-std=c++20", "-O1", "-Wall"], [source])
    given = "\n".join(" ".join(map(str, (NUM_WARPS, len(jobs), *jobs))) for jobs in cases)
    printed = subprocess.run([tool], input=given, capture_output=True, text=True, timeout=60, check=True).stdout
    lines = [[int(number) for number in line.split()] for line in printed.splitlines()]
    return [(line[0], list(zip(line[1::2], line[2::2], strict=True))) for line in lines]


def random_jobs(rng: random.Random) -> list[int]:
    """Tiles of jobs of nearly one length, of similar lengths, or of any lengths; the longest come first, or nearly so."""
    around, spread = rng.choice([1, 4, 33, 600]), rng.choice([0.02, 0.5, 0.98])
    jobs = [max(1, round(around * rng.uniform(1 - spread, 1 + spread))) for _ in range(rng.randint(1, 40))]
    if rng.random() < 0.3:
        jobs.append(around * rng.randint(10, 100))
    return sorted(jobs, reverse=True) if rng.random() < 0.7 else jobs


def test_every_tile_has_a_warp() -> None:
    """Jobs are dealt in order. A job in pieces has its warps for itself, and no warp has more than the limit."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cases = [random_jobs(rng) for _ in range(4000)]
    for jobs, (most_tiles, dealt) in zip(cases, deal(cases), strict=True):
        tiles: Counter[int] = Counter()
        shared = Counter(first for first, pieces in dealt if pieces == 1)
        next_warp = 0
        for job, (first, pieces) in zip(jobs, dealt, strict=True):
            assert pieces == -(-job // most_tiles) and first in (next_warp - 1, next_warp), f"{jobs}: {dealt}"
            for piece in range(pieces):
                tiles[first + piece] += job * (piece + 1) // pieces - job * piece // pieces
            if pieces > 1:
                assert first == next_warp and not any(first + piece in shared for piece in range(pieces)), f"{jobs}"
            next_warp = first + pieces
        assert next_warp <= NUM_WARPS, f"{jobs}: {dealt}"
        assert tiles.total() == sum(jobs) and max(tiles.values()) <= most_tiles, f"{jobs}: {dealt}"


def test_balance() -> None:
    """Of jobs of one length, no warp has a whole job more than the mean, and a single job has all warps."""
    cases = [[length] * count for length in (32, 512) for count in range(1, 41)]
    for jobs, (most_tiles, dealt) in zip(cases, deal(cases), strict=True):
        mean = sum(jobs) / NUM_WARPS
        assert most_tiles <= 1.125 * mean + min(jobs[0], mean) + 1, f"{len(jobs)} jobs: {most_tiles} tiles, mean {mean}"
        if len(jobs) in (1, 2, 4, 8):
            assert [pieces for _, pieces in dealt] == [NUM_WARPS // len(jobs)] * len(jobs)


def test_one_long_sequence_among_short_ones() -> None:
    """It has most of the warps."""
    ((most_tiles, dealt),) = deal([[2048, *[32] * 7]])
    assert dealt[0] == (0, 7) and most_tiles < 330
