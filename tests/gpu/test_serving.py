"""A kernel that stays: requests join it and leave it, nothing that the host does meanwhile waits for its end, and it may be idle.

python -m pytest -q -rs -s tests/gpu/test_serving.py             # 1, 2 and 4 GPUs, about a minute
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.callers import submit_at_random
from support.machine import require

from distmk import LLM, SamplingParams

pytestmark = pytest.mark.timeout(120)  # the watchdog
FEW = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(
    params=[pytest.param(1, marks=pytest.mark.gpu), *(pytest.param(num, marks=pytest.mark.multigpu) for num in (2, 4))]
)
def llm(request: pytest.FixtureRequest, endless: Path) -> Iterator[LLM]:
    """With a deadline of a second."""
    require("cuda", request.param)
    options = {"load_format": "dummy", "backend": "cuda", "tensor_parallel_size": request.param}
    with LLM(str(endless), max_model_len=3000, deadline_s=1.0, idle_exit_s=None, **options) as made:  # type: ignore[arg-type]
        yield made


def test_requests_join_and_leave(llm: LLM) -> None:
    submit_at_random(llm, int.from_bytes(os.urandom(3), "little"), num_requests=200, exact=False)
    launch = llm.session._running
    time.sleep(3.0)  # several deadlines
    assert len(llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids) == 8
    assert llm.session._running is launch, "the launch has ended meanwhile"


@pytest.mark.gpu
def test_close_while_idle_and_while_busy(endless: Path) -> None:
    require("cuda", 1)
    for busy in (False, True):
        llm = LLM(str(endless), max_model_len=3000, load_format="dummy", backend="cuda", idle_exit_s=None)
        llm.generate([[1, 2, 3]], FEW)
        if busy:
            llm.submit([1, 2, 3], SamplingParams(max_tokens=2900, ignore_eos=True), lambda _: None)
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < 10
