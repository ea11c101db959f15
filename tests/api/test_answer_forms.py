"""Answers with a form from Python: `AsyncLLM` in front of a model without sense, and `LLM` of a real one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.fake_engine import FakeEngine

from distmk import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams, UsageError
from distmk.api.answer_constraints import with_response_format

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
HELLO = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


async def last(outputs: Any) -> RequestOutput:
    found: list[RequestOutput] = [output async for output in outputs]
    return found[-1]


def test_async_llm(engine: FakeEngine) -> None:
    async def ask() -> None:
        async with AsyncLLM(engine) as llm:
            form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
            many = await last(llm.generate("the", SamplingParams(max_tokens=900, n=3, structured_outputs=form)))
            chat = await last(llm.chat(HELLO, SamplingParams(max_tokens=2000), response_format=FORMAT))
            for completion in (*many.outputs, *chat.outputs):
                assert completion.finish_reason == "stop"
                jsonschema.validate(json.loads(completion.text), SCHEMA)

    asyncio.run(ask())


def test_forms_that_cannot_be(engine: FakeEngine) -> None:
    async def ask(params: SamplingParams, **more: Any) -> None:
        async with AsyncLLM(engine) as llm:
            await last(llm.chat(HELLO, params, **more))

    for params, more, says in (
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a")), {}, "unclosed group"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            {"response_format": FORMAT},
            "two names",
        ),
        (SamplingParams(), {"response_format": {"type": "xml"}}, "json_schema"),
        (SamplingParams(thinking_token_budget=2), {}, "reasoning"),
    ):
        with pytest.raises(UsageError, match=says):
            asyncio.run(ask(params, **more))
    for wrong in ({"min_tokens": 2}, {"ignore_eos": True}):
        with pytest.raises(UsageError, match=f"^{next(iter(wrong))} is"):
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **wrong)
    with pytest.raises(UsageError, match="expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_response_formats_of_several_conversations() -> None:
    default = SamplingParams(temperature=0.5)
    made = with_response_format([SamplingParams(seed=3), SamplingParams()], FORMAT, default)
    assert [each.seed for each in made] == [3, None]
    assert all(each.structured_outputs == StructuredOutputsParams(json=SCHEMA) for each in made)
    assert with_response_format(None, FORMAT, default).temperature == 0.5
    assert with_response_format(None, {"type": "text"}, default) is None


def test_a_real_model(smollm2: Path) -> None:
    with LLM(str(smollm2), tensor_parallel_size=1, max_model_len=512) as llm:
        form = StructuredOutputsParams(json=SCHEMA)
        drawn = SamplingParams(max_tokens=300, temperature=1.0, n=3, structured_outputs=form)
        free = SamplingParams(max_tokens=12)
        digits = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}"))
        prompts = ["A person as JSON: ", "Gravity is", "My number is "]
        people, gravity, number = llm.generate(prompts, [drawn, free, digits], use_tqdm=False)
        assert gravity.outputs[0].text == llm.generate(prompts[1], free, use_tqdm=False)[0].outputs[0].text
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", number.outputs[0].text)
        (chat,) = llm.chat(HELLO, SamplingParams(max_tokens=300), use_tqdm=False, response_format=FORMAT)
        for completion in (*people.outputs, *chat.outputs):
            assert completion.finish_reason == "length" or not jsonschema.validate(json.loads(completion.text), SCHEMA)
