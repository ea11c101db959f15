"""Tool calls through /v1/chat/completions, with the openai client where it has a type for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.served import MODEL, Served, served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "noop"}},
]
STRICT = {"name": "f", "strict": True}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, 漢"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
)
TEMPLATE = "<tool_call> <think> </think>"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose model writes in Hermes' format, and thinks as Qwen3 does."""
    with served() as running:
        running.engine.template = TEMPLATE
        yield running
        running.settled()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    server.engine.says = CALLS
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.engine.says = None


def settings(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 500, "tools": TOOLS, **more}


def events(server: Served, **more: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events, as they are sent."""
    answer = server.http.post("/v1/chat/completions", json=settings(stream=True, **more))
    assert answer.status_code == 200, answer.text
    return [choice for line in answer.text.split("\n\n")[:-2] for choice in json.loads(line[6:])["choices"]]


def test_a_message_with_calls(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**settings()).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    first, second = choice.message.tool_calls or []
    assert first.type == second.type == "function" and first.id.startswith("call_") and first.id != second.id
    assert (first.function.name, first.function.arguments) == ("get_weather", '{"city": "Paris, 漢"}')
    assert (second.function.name, second.function.arguments) == ("noop", "{}")


def test_a_message_of_calls_alone_has_no_content(client: openai.OpenAI, server: Served) -> None:
    server.engine.says = CALLS[CALLS.index("<") :]
    (choice,) = client.chat.completions.create(**settings()).choices
    assert choice.message.content is None and len(choice.message.tool_calls or []) == 2
    assert events(server)[0]["delta"].items() >= {"role": "assistant", "content": None}.items()


def test_deltas_are_those_of_openai(client: openai.OpenAI, server: Served) -> None:
    choices = events(server)
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert all(len(delta.get("tool_calls", ())) < 2 for delta in deltas)
    for index, name in enumerate(("get_weather", "noop")):
        first, *rest = [call for call in calls if call["index"] == index]
        assert first == {
            "index": index,
            "id": first["id"],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert rest and all(set(call) == {"index", "function"} for call in rest)
        assert all(set(call["function"]) == {"arguments"} for call in rest)
    assert calls.index(next(call for call in calls if call["index"] == 1)) > 3  # arguments come in several pieces
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**settings()) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Let me see."
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"city": "Paris, 漢"}', "{}"]


def test_a_round_of_calls(client: openai.OpenAI, server: Served) -> None:
    """What the server sent goes back to it with the tools' answers."""
    (choice,) = client.chat.completions.create(**settings()).choices
    calls = choice.message.tool_calls or []
    answers: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    server.engine.says = "It rains."
    messages = [*HELLO, choice.message.to_dict(), *answers]
    again = client.chat.completions.create(**settings(messages=messages)).choices[0]
    assert again.finish_reason == "stop" and again.message.content == "It rains." and not again.message.tool_calls
    prompt = server.engine.tokenizer.decode(server.engine.prompts[-1])
    assert prompt.startswith("tool: get_weather\ntool: noop\n") and prompt.count("tool: rain") == 2


def test_parallel_calls_may_be_off(client: openai.OpenAI, server: Served) -> None:
    (choice,) = client.chat.completions.create(**settings(parallel_tool_calls=False)).choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["get_weather"]
    deltas = events(server, parallel_tool_calls=False)
    assert {call["index"] for choice in deltas for call in choice["delta"].get("tool_calls", ())} == {0}


@pytest.mark.parametrize("more", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_all_is_content(client: openai.OpenAI, server: Served, more: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.create(**settings(**more)).choices
    assert choice.message.content == CALLS and choice.finish_reason == "stop" and not choice.message.tool_calls
    assert "tool:" not in server.engine.tokenizer.decode(server.engine.prompts[-1])


def test_a_call_that_is_cut_off(client: openai.OpenAI, server: Served) -> None:
    """By the limit of tokens, by a stop string, or by an end of the model's own: the arguments are as far as they came."""
    for more, reason, end in (
        ({"max_tokens": 72}, "length", None),
        ({"stop": "Paris"}, "tool_calls", '{"city": "'),
    ):
        (choice,) = client.chat.completions.create(**settings(**more)).choices
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == reason and '{"city": "Paris, 漢"}'.startswith(call.function.arguments)
        assert end is None or call.function.arguments == end
    server.engine.says = CALLS.replace("{", "(")
    (choice,) = client.chat.completions.create(**settings()).choices
    assert choice.message.content == server.engine.says and choice.finish_reason == "stop"


def test_text_that_was_held_back_comes_with_the_end(client: openai.OpenAI, server: Served) -> None:
    server.engine.says = "I like <tool_ "
    (choice,) = client.chat.completions.create(**settings()).choices
    assert choice.message.content == server.engine.says
    assert "".join(each["delta"].get("content") or "" for each in events(server)) == server.engine.says


def test_log_probabilities_cover_all_tokens(client: openai.OpenAI, server: Served) -> None:
    (choice,) = client.chat.completions.create(**settings(logprobs=True)).choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert spelled.decode().startswith(CALLS)
    streamed = [
        entry for each in events(server, logprobs=True) for entry in (each["logprobs"] or {}).get("content", ())
    ]
    assert len(streamed) == len(entries)


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nop"}}}, "tool_choice", "none of the tools"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", '"auto"'),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "an answer ends"),
        ({"tool_choice": "maybe"}, "tool_choice", '"auto"'),
        ({"tool_choice": 3}, "tool_choice", '"auto"'),
        (
            {"tools": [{"type": "function", "function": {**STRICT, "parameters": {"not": {}}}}]},
            "tools",
            "Unimplemented",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", '"type": "function"'),
        ({"tools": [{"type": "function"}]}, "tools", '"type": "function"'),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name of tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, None, ""),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "parameters"),
        ({"tools": "f"}, "tools", "list"),
        ({"tools": ["f"]}, "tools.0", "dictionary"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ],
)
def test_what_cannot_be_asked(server: Served, more: dict[str, Any], param: str | None, says: str) -> None:
    answer = server.http.post("/v1/chat/completions", json=settings(**more))
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"] and "\n" not in error["message"]


def test_a_template_whose_calls_are_not_known() -> None:
    with served() as plain:
        answer = plain.http.post("/v1/chat/completions", json=settings())
        assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    with served(tool_call_parser="hermes") as named:
        named.engine.says = CALLS
        (choice,) = named.http.post("/v1/chat/completions", json=settings()).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 2


def test_tools_are_tokenized(server: Served) -> None:
    body = {"messages": HELLO, "tools": TOOLS}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == server.engine.render_chat(HELLO, tools=TOOLS) != server.engine.render_chat(HELLO)
