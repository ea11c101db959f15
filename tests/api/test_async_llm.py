"""AsyncLLM: tasks that generate at once, and leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine, until

from distmk import LLM, AsyncLLM
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.token_output import TokenOutput
from distmk.errors import RankLostError, UsageError

pytestmark = pytest.mark.usefixtures("slab_iterations")

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine(tick_s=0.001)
    yield made
    assert made.num_left == 0
    made.close()


async def whole(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[TokenOutput]:
    return [output async for output in llm.generate(prompt, params)]


def test_many_tasks(engine: FakeEngine) -> None:
    """Each gets its own tokens, in order and whole."""

    async def run() -> None:
        llm = AsyncLLM(engine)
        prompts = [f"cat {number}" for number in range(50)]
        params = SamplingParams(max_tokens=20, temperature=0)
        together = await asyncio.gather(*(whole(llm, prompt, params) for prompt in prompts))
        for prompt, outputs in zip(prompts[:5], together, strict=False):
            assert outputs == await whole(llm, prompt, params)
        for outputs in together:
            assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [True]

    asyncio.run(run())


def test_a_model(tiny_model: Path) -> None:
    """Tasks that generate at once, some of which leave, get the tokens of `LLM.generate`."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [[1 + number, 2, 3] for number in range(24)]
    with LLM(str(tiny_model), num_workers=1, idle_exit_s=5.0) as llm:

        async def one(number: int) -> list[int]:
            tokens = []
            async with contextlib.aclosing(AsyncLLM(llm).generate(prompts[number], params)) as outputs:
                async for output in outputs:
                    tokens.append(output.token_id)
                    if number % 3 == 0 and len(tokens) == 5:
                        break
            return tokens

        async def run() -> list[list[int]]:
            return await asyncio.gather(*(one(number) for number in range(24)))

        together = asyncio.run(run())
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0)
    assert together == [ids[:5] if number % 3 == 0 else ids for number, ids in enumerate(alone)]


def test_completions_of_one_prompt(engine: FakeEngine) -> None:
    async def run() -> None:
        llm = AsyncLLM(engine)
        found: dict[int, list[int]] = {}
        for output in await whole(llm, "cat", SamplingParams(n=3, seed=4, max_tokens=20)):
            found.setdefault(output.index, []).append(output.token_id)
        for index in range(3):
            alone = await whole(llm, "cat", SamplingParams(seed=4 + index, max_tokens=20))
            assert found[index] == [output.token_id for output in alone]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["close", "cancel", "time out", "break"])
def test_leaving_cancels(engine: FakeEngine, how: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(engine)
        if how in ("close", "break"):
            async with contextlib.aclosing(llm.generate("cat", LONG)) as outputs:
                async for _ in outputs:
                    break
        elif how == "cancel":
            task = asyncio.ensure_future(whole(llm, "cat", LONG))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(whole(llm, "cat", LONG), 0.02)
        assert engine.num_left == 0 and engine.num_cancelled == 1

    asyncio.run(run())


def test_a_prompt_that_cannot_be_served_keeps_those_before_it_from_being_submitted(engine: FakeEngine) -> None:
    async def run() -> None:
        llm = AsyncLLM(engine)
        with pytest.raises(UsageError, match="out of range"):
            async with llm.submit([[1], [10**6]], LONG):
                pass
        assert engine.num_submitted == 0

    asyncio.run(run())


def test_max_tokens_that_must_fit(engine: FakeEngine) -> None:
    """Behind a prompt that leaves room for 6 tokens: 7 are refused before anything is submitted, or else cut off."""
    prompts = [[1], [1] * (engine.max_model_len - 6)]

    async def run(max_tokens: int, must_fit: bool) -> int:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        async with AsyncLLM(engine).submit(prompts, params, must_fit=must_fit) as stream:
            return sum([output.index == 1 async for outputs in stream for output in outputs])

    with pytest.raises(
        UsageError, match="max_tokens is 7; a prompt of 4090 tokens leaves room for 1 to 6 in a context"
    ):
        asyncio.run(run(7, must_fit=True))
    assert engine.num_submitted == 0
    assert asyncio.run(run(7, must_fit=False)) == asyncio.run(run(6, must_fit=True)) == 6


def test_a_long_prompt_does_not_hold_up_the_loop(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded in another thread."""
    encode, threads = engine.tokenizer.encode, list[int]()

    def noted(text: str, **options: object) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    for prompt in ("the cat", "the cat " * 300):
        asyncio.run(whole(AsyncLLM(engine), prompt, SamplingParams(max_tokens=1)))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


def test_an_engine_that_ends(engine: FakeEngine) -> None:
    error = RankLostError("rank 1 was lost")

    async def run() -> None:
        llm = AsyncLLM(engine)
        tasks = [asyncio.ensure_future(whole(llm, "cat", LONG)) for _ in range(20)]
        await asyncio.sleep(0.05)
        engine.fail(error)
        assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 20
        with pytest.raises(RankLostError):
            await whole(llm, "cat", LONG)

    asyncio.run(run())


def test_a_loop_that_ended_does_not_disturb_the_engine(engine: FakeEngine) -> None:
    async def run() -> None:
        stream = AsyncLLM(engine).submit(["cat"], LONG)
        await stream.__aenter__()  # and never left

    asyncio.run(run())
    until(lambda: engine.stats().num_generated_tokens > 10)
    engine.cancel(*(slot.request for slot in list(engine._running)))
    assert asyncio.run(whole(AsyncLLM(engine), "cat", SamplingParams(max_tokens=3)))
