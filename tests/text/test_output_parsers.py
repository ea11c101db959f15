"""Reasoning and tool calls in the text of models, whole and in pieces, right and damaged."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest
from support.model_outputs import TOOLS, WRITTEN, damaged, has_content, pieces_of, random_meaning, write

from distmk.errors import UsageError
from distmk.text.output.events import Arguments, CallBegin, Content, Event, Reasoning
from distmk.text.output.output_parser import OutputParser, choose_parsers

Found = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and calls as names and arguments."""


def parser_of(tools: str = "none", reasoning: str = "none", prompt_end: str = "", **options: Any) -> OutputParser:
    name = {"qwen3_json": "qwen3", "mistral_named": "mistral"}.get(tools, tools)
    return choose_parsers("", reasoning, name).make(prompt_end, TOOLS, **options)


def parse(parser: OutputParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def found(events: list[Event]) -> Found:
    """What the events add up to; AssertionError: a client could not put them together."""
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text):
                assert text and not content and not calls
                reasoning += text
            case Content(text):
                assert text
                content += text
            case CallBegin(index, call_id, name):
                assert index == len(calls) and call_id
                calls.append((name, ""))
            case Arguments(index, text):
                assert text and index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_that_models_write(family: str, rng: np.random.Generator) -> None:
    """However the text is cut, the calls are those that were meant."""
    draws = random.Random(int(rng.integers(1 << 32)))
    for _ in range(150):
        meant = random_meaning(draws)
        if (
            family == "qwen3"
        ):  # its values are not encoded, and cannot hold its own tags; one line break is the format's
            meant = type(meant)(
                meant.content, [(n, {k: _without_ends(v) for k, v in a.items()}) for n, a in meant.calls]
            )
        text = write(family, meant, draws)
        reasoning, content, calls = found(parse(parser_of(family), pieces_of(text, draws)))
        assert not reasoning and content == (meant.content if has_content(family, meant) else ""), text
        assert [(name, json.loads(arguments)) for name, arguments in calls] == meant.calls, text


def _without_ends(value: Any) -> Any:
    return value.strip("\n") if isinstance(value, str) else value


@pytest.mark.parametrize("family", WRITTEN)
def test_damaged_text_is_read_alike_in_all_pieces(family: str, rng: np.random.Generator) -> None:
    draws = random.Random(int(rng.integers(1 << 32)))
    for _ in range(150):
        text = damaged(write(family, random_meaning(draws), draws), draws)
        whole = found(parse(parser_of(family), [text]))
        assert found(parse(parser_of(family), pieces_of(text, draws))) == whole, text
        assert json.dumps(whole, ensure_ascii=False).encode() if "\ud800" not in text else True


CALL = '{"name": "f", "arguments": {"a": 1}}'
F = ("f", '{"a": 1}')
EXPECTED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "plain <b>text</b> \n", "plain <b>text</b> \n", []),
    ("hermes", f"A\n<tool_call>{CALL}</tool_call>\nB\n\n<tool_call>\n{CALL}\n</tool_call>\n", "A\nB", [F, F]),
    ("hermes", f"<tool_call>{CALL}", "", [F]),
    ("hermes", f"<tool_call>{CALL[:-1]}\n</tool_call>!", "!", [F]),
    ("hermes", f'<tool_call>{CALL[:-1]}, "id": [3]}}</tool_call>!', "!", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>', "", [("f", "{'a': 1}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: </tool_call>.', ".", [("f", "{a: ")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "see:  <tool_call>nothing</tool_call> ", "see:  <tool_call>nothing</tool_call> ", []),
    (
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    ("hermes", "a <tool_", "a <tool_", []),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", [("?", "{}")]),
    ("qwen3", f"<tool_call>{CALL}</tool_call>", "", [F]),
    ("qwen3", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    (
        "qwen3",
        "<function=f><parameter=city>a<parameter=days>3</parameter></function>",
        "",
        [("f", '{"city": "a", "days": 3}')],
    ),
    ("qwen3", "<function=f>\n<parameter=days>\nmany\n</parameter>\n</function>", "", [("f", '{"days": "many"}')]),
    ("qwen3", "<function=f>\n<parameter=days>\nNaN\n</parameter>\n</function>", "", [("f", '{"days": "NaN"}')]),
    ("qwen3", "<function=f>\n<parameter=city>\n12\n</parameter>\n</function>", "", [("f", '{"city": "12"}')]),
    ("qwen3", "<function=g>\n<parameter=n>\n12\n</parameter>\n</function>", "", [("g", '{"n": "12"}')]),
    ("qwen3", "<function=f>\n<parameter=city>\n\n12\n\n</parameter>\n</function>", "", [("f", '{"city": "\\n12\\n"}')]),
    ("qwen3", "<function=f>\n<parameter=city>\nPar", "", [("f", '{"city": "Par')]),
    ("qwen3", "a <function=>", "a <function=>", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, nothing", "nothing", [F]),
    ("mistral", "[TOOL_CALLS] nothing here {", "[TOOL_CALLS] nothing here {", []),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F, F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", 'Well. <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "Well.", [F]),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {"a": 1}} ', "", [F]),
    ("llama3_json", '{"name": "Ada", "age": 3} ', '{"name": "Ada", "age": 3} ', []),
    ("llama3_json", 'I say {"name": "f", "parameters": {}}', 'I say {"name": "f", "parameters": {}}', []),
    ("pythonic", "[f(a=1)]", "", [F]),
    ("pythonic", "<|python_start|>[f(a=1), f(a=1)]<|python_end|>", "", [F, F]),
    (
        "pythonic",
        "[f(a=true, b=null, c=(1, -2), d='\\d')]",
        "",
        [("f", '{"a": true, "b": null, "c": [1, -2], "d": "\\\\d"}')],
    ),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=x)]", "[f(a=x)]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
    ("pythonic", "[f(a=" + "[" * 3000 + "]" * 3000 + ")]", "[f(a=" + "[" * 3000 + "]" * 3000 + ")]", []),
    ("pythonic", "[f(a=1), f(a=", "f(a=", [F]),
    ("pythonic", "[link](x)", "[link](x)", []),
    ("granite", f"<tool_call>[{CALL}]", "", [F]),
    ("granite", "<|tool_call|>none", "<|tool_call|>none", []),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), EXPECTED, ids=lambda value: str(value)[:40])
def test_expected_calls(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        assert found(parse(parser_of(family), pieces)) == ("", content, calls)


THOUGHTS: list[tuple[str, str, str, str, str]] = [
    ("qwen3", "", "<think>\nwell\n</think>\n\n4", "well", "4"),
    ("qwen3", "", "\n<think>\n\n</think>\n\n4", "", "4"),
    ("qwen3", "", "  4 <think>", "", "  4 <think>"),
    ("qwen3", "", "<think>well ", "well ", ""),
    ("qwen3", "", "<think>a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
    ("qwen3", "", "a</think>b", "", "a</think>b"),
    ("qwen3", "x<think>\n", "well\n\nyes\n</think>\n4\n", "well\n\nyes", "4\n"),
    ("qwen3", "<think>\n\n</think>\n\n", "4", "", "4"),
    ("deepseek_r1", "", "well</think>4", "well", "4"),
    ("deepseek_r1", "<think>\n", "well</think>4", "well", "4"),
    ("deepseek_r1", "", "<think>\nwell</think>\n\n4", "well", "4"),
    ("deepseek_r1", "", "well </thin", "well </thin", ""),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "4", "", "4"),
    ("granite", "", "Here is my thought process: well. Here is my response: 4", "well.", "4"),
    ("granite", "", "Here's my thought process:\nwell\n\nHere's my response:\n4", "well", "4"),
    ("granite", "", "Here is my response: 4", "", "Here is my response: 4"),
    ("granite", "", "Here is", "", "Here is"),
]


@pytest.mark.parametrize(("family", "prompt_end", "text", "reasoning", "content"), THOUGHTS)
def test_expected_reasoning(family: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        parser = parser_of(reasoning=family, prompt_end=prompt_end)
        assert found(parse(parser, pieces)) == (reasoning, content, [])


def test_calls_are_looked_for_behind_the_reasoning(rng: np.random.Generator) -> None:
    draws = random.Random(int(rng.integers(1 << 32)))
    call = f"<tool_call>{CALL}</tool_call>"
    for text, want in (
        (f"<think>\nI could {call}\n</think>\n\n{call}", (f"I could {call}", "", [F])),
        (f"<think>I could {call}", (f"I could {call}", "", [])),
        (f"{call}{call}", ("", "", [F, F])),
    ):
        for _ in range(20):
            assert found(parse(parser_of("hermes", "qwen3"), pieces_of(text, draws))) == want
    assert found(parse(parser_of("hermes", parallel=False), [f"{call}{call}"])) == ("", "", [F])


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of("hermes")
    begin, arguments = parser.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert isinstance(begin, CallBegin) and arguments == Arguments(0, '{"a": "lo')
    assert parser.push("ng") == [Arguments(0, "ng")]
    parser = parser_of("qwen3")
    parser.push("<function=f>\n<parameter=city>\nlo")
    assert parser.push("ng") == [Arguments(0, "ng")]


@pytest.mark.parametrize(
    ("family", "part", "end"),
    [
        ("hermes", "<tool_call>{", "}"),
        ("hermes", '<tool_call>{"a": "', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', ""),
        ("qwen3", "<tool_call><function=f><parameter=", ""),
        ("qwen3", "<function=f><parameter=city>", "</parameter>"),
        ("mistral", "[TOOL_CALLS][{", "}"),
        ("mistral", f"[TOOL_CALLS][{CALL}, {{", "}]"),
        ("granite", f"<|tool_call|>[{CALL}, {{", ""),
        ("llama3_json", '<|python_tag|>{"name": "', ""),
        ("llama3_json", '{"name": "f", "parameters": {', "}"),
        ("pythonic", "[f(a=", ")]"),
        ("pythonic", "[f(a='", "')]"),
        ("pythonic", "[f(a=1), ", "("),
    ],
)
def test_no_text_takes_long(family: str, part: str, end: str) -> None:
    """A client may let a model repeat anything, and all others wait meanwhile."""
    count = 60_000 // len(part)
    began = time.process_time()
    found(parse(parser_of(family), [part * count, end * count]))
    assert time.process_time() - began < 1.5


def test_reasoning_is_known_while_it_lasts() -> None:
    parser = parser_of(reasoning="qwen3")
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        parser.push(piece)
        seen.append(parser.is_reasoning)
    assert seen == [True, True, False, False]


MARKS = {
    "hermes": "{{ '<tool_call>' }}",
    "qwen3": "<tool_call>\n<function=x>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "mistral": "[TOOL_CALLS]",
    "granite": "<|tool_call|> <tool_call>",
    "pythonic": "<|python_start|>",
}


def test_families_are_found_in_templates() -> None:
    for name, template in MARKS.items():
        assert choose_parsers(template).tools is choose_parsers("", tools=name).tools is not None, name
    for name, template in {
        "qwen3": "'<think>' + '</think>'",
        "deepseek_r1": "<｜Assistant｜><think> </think>",
        "granite": "Write your thoughts after 'Here is my thought process:'",
    }.items():
        assert choose_parsers(template).reasoning is choose_parsers("", reasoning=name).reasoning is not None, name
    plain = choose_parsers("{{ messages }}")
    assert plain.tools is None and plain.reasoning is None
    off = choose_parsers("<tool_call> </think>", "none", "none")
    assert off.tools is None and off.reasoning is None
    with pytest.raises(UsageError, match="no tool call parser 'x'; expected auto, none, "):
        choose_parsers("", tools="x")
