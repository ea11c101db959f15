"""Tests of `bash scripts/test.sh fast`: a few cases of every test that starts no process, and all tests marked `fast`."""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest

NUM_CASES = 2  # of a test function


def is_fast(item: pytest.Item) -> bool:
    """Whether the fast run has the test; the fixture `runner` starts processes."""
    if item.get_closest_marker("fast"):
        return True
    markers = ("whole", "slow", "gpu", "multigpu")
    return "runner" not in getattr(item, "fixturenames", ()) and not any(map(item.get_closest_marker, markers))


def choose(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The tests of a fast run in their order. `seed`: draws the cases of every function that is not marked `fast`."""
    rng, cases = random.Random(seed), defaultdict[str, list[pytest.Item]](list)
    for item in filter(is_fast, items):
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for of_function in cases.values():
        marked = [item for item in of_function if item.get_closest_marker("fast")]
        chosen |= set(marked or rng.sample(of_function, min(NUM_CASES, len(of_function))))
    return [item for item in items if item in chosen]


def seed_of(config: pytest.Config) -> str:
    """One for all processes of a run, and another for every run."""
    worker: dict[str, str] = getattr(config, "workerinput", {})
    return worker.get("testrunuid", "") or str(int.from_bytes(os.urandom(4), "little"))
