"""/v1/responses, by the openai client: its types, and its own assembly of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.fake_engine import FakeEngine
from support.served import MODEL, Served, served

from distmk.errors import RankLostError

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, 漢"}}\n</tool_call>'
SAYS = f"<think>\nWhy é 漢\nnot?\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Paris, 漢', 'Rome')}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose model calls tools in Hermes' format, and thinks as Qwen3 does."""
    with served() as running:
        running.engine.template = "<tool_call> <think> </think>"
        yield running
        running.settled()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    server.engine.says = "Hello."
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.engine.says = None


def asked(server: Served) -> str:
    """The last prompt."""
    text: str = server.engine.tokenizer.decode(server.engine.prompts[-1])
    return text


def test_text(client: openai.OpenAI, server: Served) -> None:
    server.engine.num_cached_tokens = 5
    answer = client.responses.create(
        model=MODEL, input="Say hello", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}
    )
    server.engine.num_cached_tokens = 0
    assert asked(server) == "system: Be brief.\nuser: Say hello\nassistant:"
    assert answer.output_text == "Hello." and answer.status == "completed" and answer.error is None
    assert (answer.temperature, answer.metadata, answer.instructions) == (0.5, {"a": "b"}, "Be brief.")
    usage = answer.usage
    assert usage is not None and usage.input_tokens == len(server.engine.prompts[-1])
    assert usage.output_tokens == len(server.engine.tokenizer.encode("Hello.")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 5 and usage.output_tokens_details.reasoning_tokens == 0


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI, server: Served) -> None:
    server.engine.says = SAYS
    answer = client.responses.create(model=MODEL, input="hello", tools=[WEATHER])
    thought, message, first, second = answer.output
    assert thought.type == "reasoning" and [part.text for part in thought.content or []] == ["Why é 漢\nnot?"]
    assert message.type == "message" and answer.output_text == "Let me see."
    assert first.type == second.type == "function_call" and first.name == second.name == "get_weather"
    assert [json.loads(each.arguments) for each in (first, second)] == [{"city": "Paris, 漢"}, {"city": "Rome"}]
    assert first.call_id != second.call_id and len({item.id for item in answer.output}) == 4
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 3
    alone = client.responses.create(model=MODEL, input="hello", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in alone.output] == ["reasoning", "message", "function_call"]
    plain = client.responses.create(model=MODEL, input="hello", tools=[WEATHER], tool_choice="none")
    assert [item.type for item in plain.output] == ["reasoning", "message"] and "<tool_call>" in plain.output_text


def test_the_client_puts_a_stream_together(client: openai.OpenAI, server: Served) -> None:
    """Events are numbered and nest; the client's own snapshots are the whole answer's."""
    server.engine.says = SAYS
    whole = client.responses.create(model=MODEL, input="hello", tools=[WEATHER], extra_body={"seed": 1})
    with client.responses.stream(model=MODEL, input="hello", tools=[WEATHER], extra_body={"seed": 1}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for begin, end in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        assert kinds.count(f"response.{begin}") == kinds.count(f"response.{end}") == (4 if "item" in begin else 2)

    def plain(answer: Any) -> list[dict[str, Any]]:
        own = ("id", "call_id", "parsed", "parsed_arguments")
        items = [item.to_dict() for item in answer.output]
        for item in items:
            for part in (item, *item.get("content", ())):
                for key in own:
                    part.pop(key, None)
        return items

    assert plain(final) == plain(whole)
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        of_item: list[Any] = [each for each in events if getattr(each, "output_index", None) == index]
        deltas = [each.delta for each in of_item if each.type == f"response.{kind}.delta"]
        (done,) = [each for each in of_item if each.type == f"response.{kind}.done"]
        assert len(deltas) > 1 and "".join(deltas) == (done.arguments if index == 2 else done.text)


def test_a_round_of_calls(client: openai.OpenAI, server: Served) -> None:
    """What the server sent goes back to it with the functions' outputs: one message of the model, with its reasoning."""
    server.engine.says = SAYS
    first = client.responses.create(model=MODEL, input="hello", tools=[WEATHER])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    seen: list[Any] = []
    render = server.engine.render_chat
    server.engine.render_chat = lambda messages, **options: (seen.append(messages), render(messages, **options))[1]
    server.engine.says = "It rains."
    items: list[Any] = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in first.output), *outputs]
    again = client.responses.create(model=MODEL, input=items, tools=[WEATHER])
    server.engine.render_chat = render
    assert again.output_text == "It rains."
    user, answer, *tools = seen[-1]
    assert user == {"role": "user", "content": "hello"} and answer["role"] == "assistant"
    assert answer["reasoning_content"] == "Why é 漢\nnot?"
    assert answer["content"] == [{"type": "text", "text": "Let me see."}]
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["get_weather"] * 2
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in tools] == [
        ("tool", call.call_id, "rain") for call in calls
    ]


def test_answers_that_are_cut_off(client: openai.OpenAI, server: Served) -> None:
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and "Hello.".startswith(answer.output_text)
    *_, last = client.responses.create(model=MODEL, input="hello", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    server.engine.says = ""
    assert client.responses.create(model=MODEL, input="hello").output_text == ""


def test_log_probabilities(client: openai.OpenAI, server: Served) -> None:
    """Of the text's tokens alone; in a stream with the deltas."""
    server.engine.says = "<think>\nWhy\n</think>\n\nthe cat sat"
    include: Any = ["message.output_text.logprobs"]
    answer = client.responses.create(model=MODEL, input="hello", include=include, top_logprobs=2)
    message: Any = answer.output[-1]
    logprobs = message.content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in logprobs).decode().strip().startswith("the cat sat")
    assert all(len(each.top_logprobs) == 2 for each in logprobs)
    stream = client.responses.create(model=MODEL, input="hello", include=include, top_logprobs=2, stream=True)
    streamed = [each for event in stream if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.token for each in streamed] == [each.token for each in logprobs][: len(streamed)] and streamed


def test_an_engine_that_ends() -> None:
    with served(FakeEngine(tick_s=0.005)) as server:
        server.engine.says = "word " * 2000
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        kinds = []
        for event in client.responses.create(model=MODEL, input="hello", stream=True):
            kinds.append(event.type)
            if kinds.count("response.output_text.delta") == 3:
                server.engine.fail(RankLostError("rank 1 is lost"))
        assert event.type == "response.failed" and event.response.error is not None
        assert "rank 1 is lost" in event.response.error.message and event.response.status == "failed"


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"store": True}, "store", "not stored"),
        ({"background": True}, "background", "stream"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "prompt"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "there are no tools"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": {"type": "objekt"}}]}, "tools", "Invalid type"),
        ({"tools": [{"type": "web_search"}]}, "tools", '"type": "function"'),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", '"name": text'),
        ({"include": ["file_search_call.results"]}, "include", "logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "in a context of"),
        ({"top_logprobs": 50}, "top_logprobs", "0 to 20"),
        ({"n": 2}, "n", "not a parameter"),
        ({"input": 3}, "input", "list of items"),
        ({"input": ["hello"]}, "input", '"role": "user"'),
        ({"input": []}, "input", "no messages"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "not stored"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input", "nobody"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_text"),
    ],
)
def test_what_cannot_be_asked(server: Served, more: dict[str, Any], param: str, says: str) -> None:
    answer = server.http.post("/v1/responses", json={"model": MODEL, "input": "hello", **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"] and "\n" not in error["message"]


def test_what_asks_for_nothing(client: openai.OpenAI) -> None:
    """Parameters that agents send without being told to."""
    answer = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "hello"}],
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        truncation="disabled",
        tools=[],
        tool_choice="auto",
        service_tier="auto",
        user="me",
        prompt_cache_key="k",
    )
    assert answer.output_text == "Hello."
