"""One LLM, many callers: threads and streams at once, requests that are cancelled, Ctrl-C that loses one call."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.callers import submit_at_random
from support.helpers import Runner

from distmk import LLM, SamplingParams
from distmk.api.outputs import output_of
from distmk.engine.token_output import TokenOutput
from distmk.errors import Interrupted, UsageError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("slab_iterations")]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest, endless: Path) -> Iterator[LLM]:
    with LLM(
        str(endless), load_format="dummy", tensor_parallel_size=request.param, num_workers=1, max_model_len=30_000
    ) as made:
        yield made


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_threads_at_once(llm: LLM) -> None:
    prompts = [[1 + number, 2, 3] for number in range(6)]
    expected = [tokens(llm, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: tokens(llm, prompt), prompts)) == expected


@pytest.mark.whole
def test_streams_in_turns(llm: LLM) -> None:
    """Two streams of one thread and a call between them: each gets its own tokens, all of them."""
    prompts = [[1, 2, 3], [4, 5]]
    expected = [tokens(llm, prompt, LONG) for prompt in prompts]
    short = tokens(llm, [6])
    streams = [llm.stream([prompt], LONG) for prompt in prompts]
    found: list[list[TokenOutput]] = [[], []]
    for turn in range(48):
        for stream, taken in zip(streams, found, strict=True):
            taken.append(next(stream))
        if turn % 16 == 0:
            assert tokens(llm, [6]) == short
    for stream, taken in zip(streams, found, strict=True):
        taken += stream
        assert taken[-1].finish_reason == "length"
    assert [[token.token_id for token in taken] for taken in found] == expected


def test_submitted_requests(llm: LLM) -> None:
    """Four times as many as run at once, a third of them cancelled at random moments: the others are complete."""
    submit_at_random(llm, int.from_bytes(os.urandom(3), "little"))


def test_unfinished_output_says_so(llm: LLM) -> None:
    requests = llm.make_requests([[1, 2, 3]], LONG)
    stream = llm.run(requests)
    taken = [next(stream).token_id for _ in range(3)]
    stream.close()
    output = output_of(requests[0]).outputs[0]
    assert output.finish_reason in (None, "abort") and output.token_ids[:3] == taken
    assert not output_of(requests[0]).finished
    assert len(tokens(llm, [1, 2, 3])) == 20


def test_close_ends_the_call_of_another_thread(llm: LLM) -> None:
    begun = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=29_000, ignore_eos=True)):
                begun.set()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    llm.close()
    reader.join(30)
    assert [type(failure) for failure in failures] == [Interrupted] and "closed before" in str(failures[0])
    with pytest.raises(UsageError, match="closed"):
        tokens(llm, [1, 2, 3])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ctrl_c_loses_the_interrupted_call_alone(num_ranks: int, runner: Runner, endless: Path) -> None:
    """At random moments; DISTMK_INTERRUPTS is the number of interrupted calls."""
    seed, num_calls = int.from_bytes(os.urandom(3), "little"), os.environ.get("DISTMK_INTERRUPTS", "40")
    job = [sys.executable, str(Path(__file__).with_name("interrupts_job.py"))]
    done = runner.run([*job, str(endless), str(num_ranks), num_calls, str(seed)])
    assert done.status == 0 and f"of {num_calls} calls were cut off" in done.stdout, (seed, done)


def test_close_with_a_stream_suspended_on_another_thread(llm: LLM) -> None:
    streams: list[Iterator[TokenOutput]] = []
    released = threading.Event()

    def begin() -> None:
        streams.append(llm.stream([[1, 2, 3]], SamplingParams(max_tokens=29_000, ignore_eos=True)))
        next(streams[0])
        released.wait(60)

    thread = threading.Thread(target=begin)
    thread.start()
    while not streams:
        time.sleep(0.01)
    time.sleep(0.1)
    closer = threading.Thread(target=llm.close, daemon=True)
    closer.start()
    closer.join(20)
    hung = closer.is_alive()
    released.set()
    thread.join()
    assert not hung
    with pytest.raises(Interrupted, match="closed before the call was over"):
        list(streams[0])


@pytest.mark.whole
def test_stream_left_by_a_thread_that_ended(llm: LLM) -> None:
    streams: list[Iterator[TokenOutput]] = []

    def begin() -> None:
        streams.append(llm.stream([[1, 2, 3]], LONG))
        next(streams[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert len(list(streams[0])) == 1499
    assert len(tokens(llm, [1, 2, 3])) == 20


def test_exception_on_return_from_the_native_start(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads run, and nothing in Python has got hold of the launch."""
    expected = tokens(llm, [1, 2, 3])
    library = llm.session.backend._library  # type: ignore[attr-defined]
    start = library.distmk_start

    def cut_off(*arguments: object) -> None:
        start(*arguments)
        raise KeyboardInterrupt

    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(library, "distmk_start", cut_off)
            with pytest.raises(KeyboardInterrupt):
                tokens(llm, [1, 2, 3], LONG)
        assert tokens(llm, [1, 2, 3]) == expected
