"""How several sequences share the workers: the longest split of a batch is hardly longer than it must be."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from support.ranks_in_process import build_in_one

from distmk.tasks.splits import ANY_LENGTH, MAX_KV_SPLITS

pytestmark = pytest.mark.timeout(120)

Case = tuple[int, int, int, int, list[int]]  # budget, least length of a split, most splits of a run, window, positions


def random_case(rng: random.Random) -> Case:
    """Sequences of nearly one length, as after prompts of one length; of similar lengths; or of any lengths."""
    around, spread = rng.randint(100, 20000), rng.choice([0.005, 0.1, 0.5, 0.95])
    lengths = [max(1, int(around * rng.uniform(1 - spread, 1 + spread))) for _ in range(rng.randint(2, 16))]
    window = rng.choice([ANY_LENGTH, rng.randint(64, around)])
    return rng.choice([4, 16, 33, 132]), rng.choice([16, 64]), MAX_KV_SPLITS, window, lengths


def shortest(budget: int, seen: list[int]) -> int:
    """The length of the longest split with which the runs have no more splits than the budget, by trying each."""
    low, high = 1, max(seen)
    while low < high:
        middle = (low + high) // 2
        fits = sum(-(-each // middle) for each in seen) <= budget
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def counts(cases: list[Case]) -> list[list[int]]:
    source = Path(__file__).with_name("count_splits.cpp")
    tool = build_in_one("count_splits", ["-std=c++20", "-O1", "-pthread", "-Wall"], [source])
    given = "\n".join(" ".join(map(str, (*head, len(lengths), *lengths))) for *head, lengths in cases)
    told = subprocess.run([tool], input=given, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[int(number) for number in line.split()] for line in told.splitlines()]


def test_longest_split() -> None:
    """Each worker has at most one split, and none is more than a sixteenth longer than necessary; or, where one of the two
    would take splits of more than twice the mean, splits have the mean length.
    """
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cases = [random_case(rng) for _ in range(3000)]
    feasible = 0
    for case, found in zip(cases, counts(cases), strict=True):
        budget, least, most_splits, window, lengths = case
        seen = [min(each, window) for each in lengths]
        assert all(1 <= splits <= min(most_splits, -(-each // least)) for splits, each in zip(found, seen, strict=True))
        longest = max(
            (-(-each // splits) for splits, each in zip(found, seen, strict=True) if splits < most_splits), default=0
        )
        mean, best = max(least, sum(seen) // budget), max(least, shortest(budget, seen))
        if len(seen) <= budget and best <= 1.8 * mean:
            feasible += 1
            assert sum(found) <= budget, f"{case}: {found}"
            assert longest <= best * 17 / 16 + 1, f"{case}: {found}, where splits of {best} are enough"
        else:
            assert longest <= 2 * mean, f"{case}: {found}"
    assert feasible > len(cases) // 2


def test_sequences_of_nearly_one_length() -> None:
    """They have the same number of splits: as many as there are for each of them."""
    found = counts([(16, 64, 16, ANY_LENGTH, [8192 + 17 * i for i in range(n)]) for n in (2, 4, 8, 16)])
    assert found == [[16 // n] * n for n in (2, 4, 8, 16)]
