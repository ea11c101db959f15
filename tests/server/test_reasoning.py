"""Reasoning in answers of /v1/chat/completions, whole and in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.served import MODEL, Served, served

HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think>\nWhy é 漢\nnot?\n</think>\n\nHello."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        running.engine.template = "<think> </think> <tool_call>"
        yield running
        running.settled()


def whole(server: Served, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 200, **more}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def streamed(server: Served, **more: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """The joined texts of the deltas by key, and the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 200, **options, **more}
    lines = server.http.post("/v1/chat/completions", json=body).text.split("\n\n")[:-2]
    texts: dict[str, str] = {}
    pieces = [json.loads(line[6:]) for line in lines]
    for piece in pieces[:-1]:
        for key, text in piece["choices"][0]["delta"].items():
            texts[key] = texts.get(key, "") + (text or "")
    return texts, pieces[-1]["usage"]


@pytest.mark.parametrize(
    ("says", "prompt_end", "reasoning", "content"),
    [
        (THOUGHT, "", "Why é 漢\nnot?", "Hello."),
        (THOUGHT.removeprefix("<think>\n"), "<think>\n", "Why é 漢\nnot?", "Hello."),
        ("Hello.", "<think>\n\n</think>\n\n", None, "Hello."),
        ("Hello.", "", None, "Hello."),
        ("<think>Why", "", "Why", None),
    ],
)
def test_reasoning_is_apart(
    server: Served, says: str, prompt_end: str, reasoning: str | None, content: str | None
) -> None:
    server.engine.says, server.engine.prompt_end = says, prompt_end
    answer = whole(server)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    texts, usage = streamed(server)
    assert texts["role"] == "assistant" and usage == answer["usage"]
    assert (texts.get("reasoning_content"), texts.get("content") or None) == (reasoning, content)
    server.engine.prompt_end = ""


def test_usage_counts_the_tokens_of_reasoning(server: Served) -> None:
    server.engine.says = THOUGHT
    usage = whole(server)["usage"]
    inside = len(server.engine.tokenizer.encode(THOUGHT[: THOUGHT.index("</think>") + 8]))
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert inside - len("<think>") < counted <= inside + 1 < usage["completion_tokens"]
    server.engine.says = "Hello."
    assert whole(server)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_may_be_left_out(server: Served) -> None:
    server.engine.says = THOUGHT
    message = whole(server, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"] == "Hello."
    texts, _ = streamed(server, include_reasoning=False)
    assert texts == {"role": "assistant", "content": "Hello."}


def test_stop_strings_and_logprobs_go_on(server: Served) -> None:
    server.engine.says = THOUGHT
    answer = whole(server, stop="not", logprobs=True)["choices"][0]
    assert answer["message"]["reasoning_content"] == "Why é 漢\n" and answer["message"]["content"] is None
    assert answer["stop_reason"] == "not" and answer["finish_reason"] == "stop"
    spelled = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]["content"])
    assert spelled.decode().startswith(THOUGHT[: THOUGHT.index("not")])


def test_calls_behind_reasoning(server: Served) -> None:
    server.engine.says = '<think>\nWhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    message = whole(server, tools=tools)["choices"][0]["message"]
    assert message["reasoning_content"] == "Why" and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_several_choices_are_parsed_apart(server: Served) -> None:
    server.engine.says = THOUGHT
    choices = whole(server, n=3)["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Hello."] * 3


def test_without_a_parser_the_text_is_as_it_is_written() -> None:
    for config, template in (({}, "plain"), ({"reasoning_parser": "none"}, "<think> </think>")):
        with served(**config) as server:
            server.engine.template, server.engine.says = template, THOUGHT
            answer = whole(server)
            assert answer["choices"][0]["message"]["content"] == THOUGHT
            assert "reasoning_content" not in answer["choices"][0]["message"]
            assert "completion_tokens_details" not in answer["usage"]
    with served(reasoning_parser="deepseek_r1") as server:
        server.engine.says = "Why</think>Hello."
        assert whole(server)["choices"][0]["message"]["reasoning_content"] == "Why"
