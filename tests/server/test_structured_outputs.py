"""Answers with a form over HTTP: what random tokens within it spell is what the client asked for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from support.served import MODEL, Served, served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "漢"]}, "days": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED = {"name": "trip", "schema": SCHEMA, "strict": True}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "plan", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "noop"}},
]
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}


class Trip(pydantic.BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose model calls tools in Hermes' format, and thinks as Qwen3 does."""
    with served() as running:
        running.engine.template = "<tool_call> <think> </think>"
        yield running
        running.settled()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.engine.prompt_end = ""


def post(server: Served, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HELLO},
        COMPLETIONS: {"prompt": "the"},
        RESPONSES: {"input": "hello"},
    }
    base = prompts[path]
    if path != RESPONSES:
        base |= {"max_tokens": 3000}
    answer = server.http.post(path, json={"model": MODEL, **base, **body})
    assert answer.status_code == status, answer.text
    made: dict[str, Any] = answer.json()
    return made


def texts(path: str, made: dict[str, Any]) -> list[str]:
    if path == RESPONSES:
        return [part["text"] for item in made["output"] if item["type"] == "message" for part in item["content"]]
    return [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in made["choices"]]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}),
        (CHAT, {"structured_outputs": COMPACT, "n": 3}),
        (COMPLETIONS, {"guided_json": SCHEMA, "n": 2}),
        (COMPLETIONS, {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " "}),
        (RESPONSES, {"structured_outputs": COMPACT}),
    ],
)
def test_json_of_a_schema(server: Served, path: str, asked: dict[str, Any]) -> None:
    server.engine.prompt_end = "<think></think>"
    found = texts(path, post(server, path, **asked))
    assert len(found) == asked.get("n", 1)
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("asked", [{"guided_regex": "[a-c]{2,4}/x"}, {"structured_outputs": {"regex": "[a-c]{2,4}/x"}}])
def test_regular_expressions(server: Served, asked: dict[str, Any]) -> None:
    assert re.fullmatch("[a-c]{2,4}/x", texts(COMPLETIONS, post(server, COMPLETIONS, **asked))[0])


def test_choices_grammars_and_objects(server: Served) -> None:
    choices = ["one", 'two "2"', "漢"]
    asked: dict[str, Any]
    for asked in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        assert texts(COMPLETIONS, post(server, COMPLETIONS, **asked))[0] in choices
    for asked in ({"guided_grammar": 'start: "a"+ "b"'}, {"structured_outputs": {"grammar": 'start: "a"+ "b"'}}):
        assert re.fullmatch("a+b", texts(COMPLETIONS, post(server, COMPLETIONS, **asked))[0])
    made = post(server, COMPLETIONS, response_format={"type": "json_object"})["choices"][0]
    assert made["finish_reason"] == "length" or isinstance(json.loads(made["text"]), dict)


def test_the_client_parses_models(client: openai.OpenAI, server: Served) -> None:
    server.engine.prompt_end = "<think></think>"
    chat = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Trip, max_tokens=3500)
    assert isinstance(chat.choices[0].message.parsed, Trip) or chat.choices[0].finish_reason == "length"


def test_streams(server: Served) -> None:
    server.engine.prompt_end = "<think></think>"
    body = {"model": MODEL, "messages": HELLO, "stream": True, "structured_outputs": COMPACT}
    lines = server.http.post(CHAT, json=body).text.split("\n\n")[:-2]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line[6:])["choices"]]
    jsonschema.validate(json.loads("".join(delta.get("content") or "" for delta in deltas)), SCHEMA)


def test_calls_that_are_required(client: openai.OpenAI, server: Served) -> None:
    server.engine.prompt_end = "<think></think>"
    for choice in ("required", {"type": "function", "function": {"name": "plan"}}):
        settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 3500}
        (made,) = client.chat.completions.create(model=MODEL, messages=HELLO, **settings).choices
        assert made.message.content is None and made.finish_reason == "tool_calls" and made.message.tool_calls
        for call in made.message.tool_calls:
            assert call.type == "function"
            schema = SCHEMA if call.function.name == "plan" else {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(call.function.arguments), schema)
        assert choice == "required" or [call.function.name for call in made.message.tool_calls] == ["plan"]


def test_calls_of_responses(server: Served) -> None:
    server.engine.prompt_end = "<think></think>"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for choice, name in (({"type": "function", "name": "plan"}, "plan"), ("required", None)):
        made = post(server, RESPONSES, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (item,) = made["output"]
        assert item["type"] == "function_call" and item["name"] == (name or item["name"])
        if item["name"] == "plan":
            jsonschema.validate(json.loads(item["arguments"]), SCHEMA)


def test_a_form_beside_tools(server: Served) -> None:
    """As agents ask for it: the answer has the form, or calls functions."""
    server.engine.prompt_end = "<think></think>"
    for _ in range(4):
        made = post(server, CHAT, tools=TOOLS, response_format={"type": "json_schema", "json_schema": NAMED})
        message = made["choices"][0]["message"]
        if not message.get("tool_calls"):
            jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_strict_functions_leave_text_free(server: Served) -> None:
    made = post(server, CHAT, tools=TOOLS, tool_choice="auto")["choices"][0]
    assert made["finish_reason"] in ("stop", "tool_calls", "length")
    loose = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
    for tools, is_held in ((TOOLS, True), (loose, False)):
        post(server, CHAT, tools=tools, max_tokens=4)
        assert (server.engine.params[-1].structured_outputs is not None) is is_held


def test_the_form_begins_behind_the_reasoning(server: Served) -> None:
    server.engine.prompt_end = "<think>\n"
    asked: dict[str, Any] = {"structured_outputs": COMPACT, "thinking_token_budget": 9, "max_tokens": 3500}
    message = post(server, CHAT, **asked)["choices"][0]["message"]
    assert message["reasoning_content"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    found = post(server, CHAT, thinking_token_budget=4, max_tokens=100)
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] < 4 + 16


def test_the_form_begins_where_the_named_parser_says() -> None:
    for template, parser, has_reasoning in (("<think> </think>", "none", False), ("", "deepseek_r1", True)):
        with served(reasoning_parser=parser) as running:
            running.engine.template = template
            budget = {"thinking_token_budget": 3} if has_reasoning else {}
            message = post(running, CHAT, guided_choice=["a"], **budget)["choices"][0]["message"]
            assert message["content"] == "a" and bool(message.get("reasoning_content")) is has_reasoning


@pytest.mark.parametrize(
    ("path", "asked", "param", "says"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", '"json_object"'),
        (CHAT, {"response_format": "json"}, "response_format", "json_schema"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", '"schema"'),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "x",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format",
            "Unimplemented",
        ),
        (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        (COMPLETIONS, {"structured_outputs": {"jsn": {}}}, "structured_outputs", "json_object"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "no form"),
        (COMPLETIONS, {"structured_outputs": []}, "structured_outputs", "dictionary"),
        (COMPLETIONS, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "two forms"),
        (COMPLETIONS, {"guided_json": {"type": "objekt"}}, "guided_json", "Invalid type: objekt"),
        (COMPLETIONS, {"guided_choice": []}, "guided_choice", "one or more"),
        (COMPLETIONS, {"guided_regex": "a", "min_tokens": 2}, "min_tokens", "form is complete"),
        (COMPLETIONS, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "form is complete"),
        (COMPLETIONS, {"thinking_token_budget": 3}, "thinking_token_budget", "chat"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget", "0 or more"),
        (CHAT, {"tools": TOOLS, "guided_regex": "(a"}, "guided_regex", "unclosed"),
    ],
)
def test_what_cannot_be_asked(server: Served, path: str, asked: dict[str, Any], param: str, says: str) -> None:
    error = post(server, path, 400, **asked)["error"]
    assert error["param"] == param and says in error["message"] and "\n" not in error["message"], error


def test_schemas_that_would_take_hours(server: Served) -> None:
    """They are refused while other requests are answered."""
    nested: Any = {}
    for _ in range(150):
        nested = {"items": nested}
    patterns = [{"type": "string", "pattern": f"^(.*a.{{{number}}}b.*)$"} for number in range(40)]
    large = {"enum": [f"{number} {'x' * 12}" for number in range(90_000)]}
    for schema in (nested, large, {"allOf": patterns}):
        begin = time.monotonic()
        post(server, CHAT, 400, structured_outputs={"json": schema})
        assert time.monotonic() - begin < 15
