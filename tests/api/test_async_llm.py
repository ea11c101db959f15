"""AsyncLLM: tasks that generate at once, and leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine, until

from distmk import LLM, AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind
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
    return [output async for output in llm.stream(prompt, params)]


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
            async with contextlib.aclosing(AsyncLLM(llm).stream(prompts[number], params)) as outputs:
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
            async with contextlib.aclosing(llm.stream("cat", LONG)) as outputs:
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


def test_outputs_are_those_of_vllm(engine: FakeEngine) -> None:
    """Cumulative ones grow; deltas joined, and the final one alone, are the same."""

    async def run() -> None:
        llm = AsyncLLM(engine)
        engine.num_cached_tokens = 2

        async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
            params = SamplingParams(n=2, seed=7, temperature=1, max_tokens=30, logprobs=1, output_kind=kind)
            return [output async for output in llm.generate("the cat", params, request_id="r")]

        so_far = await outputs(RequestOutputKind.CUMULATIVE)
        (final,) = await outputs(RequestOutputKind.FINAL_ONLY)
        deltas = await outputs(RequestOutputKind.DELTA)
        assert all(each.request_id == "r" and each.num_cached_tokens == 2 for each in (*so_far, final, *deltas))
        assert final.finished and not so_far[0].finished and final.prompt == "the cat" and final.metrics is not None
        for index in range(2):
            grown = [each.outputs[index] for each in so_far]
            assert all(after.text.startswith(before.text) for before, after in itertools.pairwise(grown))
            assert all(
                after.token_ids[: len(before.token_ids)] == before.token_ids
                for before, after in itertools.pairwise(grown)
            )
            whole, pieces = final.outputs[index], [each.outputs[index] for each in deltas]
            assert grown[-1] == whole and whole.index == index and len(grown) > 3
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
            assert [found for piece in pieces for found in piece.logprobs or ()] == whole.logprobs
            assert pieces[-1].finish_reason == whole.finish_reason is not None
            assert (
                pieces[-1].cumulative_logprob
                == whole.cumulative_logprob
                == sum(found[token].logprob for token, found in zip(whole.token_ids, whole.logprobs or (), strict=True))
            )

    asyncio.run(run())


def test_abort(engine: FakeEngine) -> None:
    """The request's generator ends in order; its id may then be used again, and others go on."""

    async def run() -> None:
        llm = AsyncLLM(engine)

        async def last(name: str, params: SamplingParams) -> RequestOutput:
            return [output async for output in llm.generate("cat", params, name)][-1]

        tasks = [asyncio.ensure_future(last(name, LONG)) for name in ("a", "b", "c")]
        until_s = time.monotonic() + 5
        while engine.stats().num_running < 3 and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        with pytest.raises(UsageError, match="request_id 'b' is running already"):
            await last("b", LONG)
        await llm.abort("b")
        await llm.abort(["a", "c", "nobody"])
        for name, output in zip("abc", await asyncio.gather(*tasks), strict=True):
            assert output.request_id == name and output.outputs[0].finish_reason == "abort" and not output.finished
        assert (await last("b", SamplingParams(max_tokens=3))).finished

    asyncio.run(run())


def test_a_model_that_is_loaded_here(tiny_model: Path) -> None:
    """By its name and by engine arguments: the outputs are those of `LLM`, and closing frees it."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"num_workers": 1}

    async def run(llm: AsyncLLM) -> RequestOutput:
        async with llm:
            found = await asyncio.gather(*(one(llm, number) for number in range(3)))
        with pytest.raises(UsageError):
            await one(llm, 0)
        assert [output.request_id for output in found] == ["0", "1", "2"]
        return found[1]

    async def one(llm: AsyncLLM, number: int) -> RequestOutput:
        return [output async for output in llm.generate([1 + number, 2, 3], params, str(number))][-1]

    with LLM(str(tiny_model), **options) as llm:
        first, second = llm.generate([[1, 2, 3], [2, 2, 3]], params)
    assert [first.request_id, second.request_id] == ["0", "1"]
    for made in (
        AsyncLLM(tiny_model, **options),
        AsyncLLM.from_engine_args(EngineArgs(str(tiny_model), **options), tensor_parallel_size=1),
    ):
        output = asyncio.run(run(made))
        assert output.outputs[0].token_ids == second.outputs[0].token_ids
        assert output.num_cached_tokens == 0 and output.finished
        for times in (output.metrics, second.metrics):
            assert times is not None and times.num_generation_tokens == 12
            order = [times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts]
            assert order == sorted(order) and 0 < order[0] <= time.monotonic()
            assert abs(times.arrival_time - time.time()) < 300 and times.first_token_latency > 0


def test_a_chat(engine: FakeEngine) -> None:
    async def run() -> str:
        llm, messages = AsyncLLM(engine, chat_template="own "), [{"role": "user", "content": "hi"}]
        params = SamplingParams(max_tokens=2)
        assert [output async for output in llm.chat(messages, params)][-1].finished
        with pytest.raises(UsageError, match="no option of a conversation"):
            _ = [output async for output in llm.chat(messages, params, wrong=1)]  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="lora_request is"):
            _ = [output async for output in llm.generate("a", params, lora_request="x", priority=0)]
        with pytest.raises(UsageError, match="this call takes one"):
            _ = [output async for output in llm.generate(["a", "b"], params)]
        return engine.tokenizer.decode(engine.prompts[-1])

    assert asyncio.run(run()) == "own user: hi\nassistant:"
    with pytest.raises(UsageError, match="num_workers is an option"):
        AsyncLLM(engine, num_workers=1)
