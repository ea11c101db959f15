"""Requests that come at once share the iterations of the kernel, also where they come while the launch starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from distmk import LLM, SamplingParams
from distmk.engine.token_output import TokenOutput

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("slab_iterations")]
NUM_REQUESTS, NUM_TOKENS = 6, 40
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest, endless: Path) -> Iterator[LLM]:
    with LLM(
        str(endless), load_format="dummy", tensor_parallel_size=request.param, num_workers=1, max_model_len=1000
    ) as made:
        yield made


def launch_is_held(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Each launch says that it starts, and waits until it may."""
    starts, may_start = threading.Event(), threading.Event()
    launch = llm.engine.launch

    def held() -> object:
        starts.set()
        assert may_start.wait(30)
        return launch()

    monkeypatch.setattr(llm.engine, "launch", held)
    return starts, may_start


def test_a_burst_on_a_fresh_engine_runs_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come while the launch of the first one starts take no iterations of their own."""
    starts, may_start = launch_is_held(llm, monkeypatch)
    ends: SimpleQueue[int] = SimpleQueue()

    def submit(number: int) -> None:
        def deliver(output: TokenOutput | BaseException) -> None:
            assert isinstance(output, TokenOutput)
            if output.finish_reason is not None:
                ends.put(number)

        llm.submit([1 + number, 2, 3], PARAMS, deliver)

    submit(0)
    assert starts.wait(30)
    for number in range(1, NUM_REQUESTS):
        submit(number)
    stats = llm.stats()
    assert stats.num_waiting == NUM_REQUESTS and stats.num_running == 0 and stats.oldest_waiting_s > 0
    may_start.set()
    assert [ends.get(timeout=60) for _ in range(NUM_REQUESTS)] == list(range(NUM_REQUESTS))
    llm.peak_memory_bytes()  # a call between launches: the last one has ended
    stats = llm.stats()
    assert stats.num_generated_tokens == NUM_REQUESTS * NUM_TOKENS and stats.num_iterations <= NUM_TOKENS + 4
    assert stats.num_waiting == stats.oldest_waiting_s == 0


def test_a_request_is_cancelled_while_its_launch_starts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_start = launch_is_held(llm, monkeypatch)
    outputs: SimpleQueue[TokenOutput | BaseException] = SimpleQueue()
    request = llm.submit([1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True), outputs.put)
    assert starts.wait(30)
    llm.cancel(request)
    output = outputs.get(timeout=1)
    may_start.set()
    assert isinstance(output, TokenOutput) and output.finish_reason == "abort"
    assert len(llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids) == NUM_TOKENS
    assert llm.stats().num_generated_tokens == NUM_TOKENS
