"""Tests of `bash scripts/test.sh fast`: a few cases of every test that starts no process, and all tests marked `fast`.

The whole run (`bash scripts/test.sh`) draws, too: of a function marked `drawn(n)`, n cases.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable

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
    rng, chosen = random.Random(seed), set()
    for of_function in _by_function(filter(is_fast, items)):
        marked = [item for item in of_function if item.get_closest_marker("fast")]
        chosen |= set(marked or rng.sample(of_function, min(NUM_CASES, len(of_function))))
    return [item for item in items if item in chosen]


def choose_drawn(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """`items` in their order, but of a function marked `drawn(n)` only n cases, drawn by `seed`. Skipped cases do not count."""
    rng, left_out = random.Random(seed), set()
    for of_function in _by_function(items):
        mark = of_function[0].get_closest_marker("drawn")
        cases = [item for item in of_function if not any(map(item.get_closest_marker, ("skip", "gpu", "multigpu")))]
        if mark and len(cases) > mark.args[0]:
            left_out |= set(cases) - set(rng.sample(cases, mark.args[0]))
    return [item for item in items if item not in left_out]


def _by_function(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return cases.values()


def seed_of(config: pytest.Config) -> str:
    """One for all processes of a run, and another for every run."""
    worker: dict[str, str] = getattr(config, "workerinput", {})
    return worker.get("testrunuid", "") or str(int.from_bytes(os.urandom(4), "little"))
