"""A launch that stays: it is idle without a hang or a busy core, notices a lost rank, and holds while nobody reads tokens."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from support.decode_scenarios import SPEC
from support.tiny import tiny_program

from distmk import LLM, SamplingParams
from distmk.backends.base import LaunchBlock
from distmk.errors import DistmkError, RankLostError
from distmk.serving.session import Session

pytestmark = pytest.mark.timeout(120)
FEW = SamplingParams(max_tokens=8, ignore_eos=True)


def resident(model: Path, num_ranks: int, **options: float) -> LLM:
    return LLM(
        str(model), tensor_parallel_size=num_ranks, num_workers=1, max_model_len=64, idle_exit_s=None, **options  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_idle_is_no_hang(num_ranks: int, tiny_model: Path) -> None:
    """It answers behind several deadlines without a request, and takes less than 2 % of a core meanwhile."""
    with resident(tiny_model, num_ranks, deadline_s=1.0) as llm:
        expected = llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids
        launch = llm.session._running
        time.sleep(2.5)
        before = cpu_s()
        time.sleep(1.5)
        used = cpu_s() - before
        assert llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids == expected
        assert llm.session._running is launch and len(expected) == 8
        assert used < 0.02 * 1.5 * (2 if os.environ.get("PYTEST_XDIST_WORKER") else 1), used


def cpu_s() -> float:
    """Time of a processor that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def test_rank_killed_while_idle(tiny_model: Path) -> None:
    with pytest.raises(RankLostError, match="rank 1"), resident(tiny_model, 2) as llm:
        llm.generate([[1, 2, 3]], FEW)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        time.sleep(0.5)
        llm.generate([[1, 2, 3]], FEW)
