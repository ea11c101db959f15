"""No program with one changed word that `check` accepts crashes, hangs or computes something else, unless the word says what.

DISTMK_MUTATIONS=5000 python -m pytest -q tests/check/test_mutants.py     # more of them: about a minute
DISTMK_TEST_SEED=7 python -m pytest -q tests/check/test_mutants.py        # those of one run again
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.mutants.hunt import hunt
from support.mutants.programs import KINDS
from support.mutants.sandbox import each_in_child

NUM_MUTATIONS = int(os.environ.get("DISTMK_MUTATIONS", "1000"))
SEED = os.environ.get("DISTMK_TEST_SEED") or str(int.from_bytes(os.urandom(4), "little"))


@pytest.mark.parametrize("kind", list(KINDS))
def test_accepted_mutants_run_as_before(kind: str) -> None:
    print(f"repeat with DISTMK_TEST_SEED={SEED} DISTMK_MUTATIONS={NUM_MUTATIONS}")
    results: list[tuple[Any, str]] = []
    for attempt in range(10):  # of a few dozen mutants all may be refused
        results += hunt(kind, NUM_MUTATIONS // len(KINDS), f"{SEED} {attempt}")
        if results:
            break
    wrong = [f"{mutant}: {what}" for mutant, what in results if what]
    assert not wrong, f"{len(wrong)} of {len(results)} accepted mutants\n" + "\n".join(wrong[:12])
    assert results


def test_children_that_crash_or_hang_are_seen() -> None:
    """The machine tells a crash and a hang, and goes on with the next job."""

    def hang() -> None:
        while True:
            pass

    jobs = [lambda: 1, lambda: os.kill(os.getpid(), 11), lambda: 2, hang, lambda: 3]
    assert list(each_in_child(jobs, step_s=1.0)) == [
        (0, 1),
        (1, "crashes (SIGSEGV)"),
        (2, 2),
        (3, "does not come back"),
        (4, 3),
    ]
