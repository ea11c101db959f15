"""Calls and tasks are served in the order in which they came, whatever the engine does meanwhile."""

from __future__ import annotations

import os
import time

import pytest
from support.simulated_engine import Callers

from distmk.engine import engine_thread

NUM_ACTIONS = 100


def run(callers: Callers, stops_early: bool) -> None:
    """Until all is over, or for a moment only; then stop the thread."""
    deadline_s = time.monotonic() + (callers.rng.random() * 0.01 if stops_early else 10)
    while not callers.is_over and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert stops_early or callers.is_over, "not over after 10 s"
    callers.thread.stop()


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("way", ["served", "faults", "stopped"])
def test_random_interleavings(way: str, leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of admission is that of submission, a launch takes all that may share it, and everything ends once."""
    monkeypatch.setattr(engine_thread, "_IDLE_POLL_S", 0.0005)
    first = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
    for seed in range(first, first + int(os.environ.get("DISTMK_TEST_RUNS", "20"))):
        callers = Callers(seed, NUM_ACTIONS, leads=leads, faults=way == "faults")
        run(callers, way == "stopped")
        callers.judge_ends()
        assert callers.violations == [], f"DISTMK_TEST_SEED={seed}"
