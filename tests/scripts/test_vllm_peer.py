"""The benchmark's vLLM: ranks that any launcher has started meet, and a token's time is what more tokens take."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from support.helpers import Runner
from support.machine import LAUNCHERS, run_job
from vllm_job import MS_PER_TOKEN

JOB = Path(__file__).with_name("vllm_job.py")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_meet(launcher: str, runner: Runner) -> None:
    done = run_job(runner, LAUNCHERS[launcher](2)([sys.executable, str(JOB)]))
    (found,) = done.objects()
    assert found["group"] == 2
    assert len(found["times_ms"]) == 3
    assert MS_PER_TOKEN / 2 < statistics.median(found["times_ms"]) < 3 * MS_PER_TOKEN, found
