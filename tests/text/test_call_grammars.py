"""Grammars of tool calls and of reasoning: the parser of the same format finds in random answers what was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from support.grammar_tokenizers import VOCABULARIES, Vocabulary
from support.random_answers import RandomWriter, allowed_tokens, text_of, write_answer
from support.random_schemas import Schema, random_schema

from distmk import SamplingParams, StructuredOutputsParams, UsageError
from distmk.api.answer_constraints import AnswerConstraints
from distmk.api.answer_forms import CallChoice, form_with_calls
from distmk.engine.token_constraint import TokenConstraint
from distmk.text.grammar.lark import answer_grammar
from distmk.text.output.events import Arguments, CallBegin, Content, Event, Reasoning
from distmk.text.output.families import REASONING, TOOLS
from distmk.text.output.output_parser import OutputParsers

FORMATS = sorted({cls.__name__: name for name, cls in reversed(TOOLS.items())}.values())
BEGINS = {"llama3_json": "{", "pythonic": "[", "mistral": "the [TOOL_CALLS]"}
"""What makes free text a call, where it is not <tool_call>."""

FORM = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


@pytest.fixture
def rng() -> random.Random:
    return random.Random()


def random_tools(rng: random.Random, family: str) -> list[dict[str, Any]]:
    return [
        _tool(rng, name, family) for name in rng.sample(["get_weather", "f", "noop", "search.web"], rng.randint(1, 3))
    ]


def _tool(rng: random.Random, name: str, family: str) -> dict[str, Any]:
    names = rng.sample(["city", "days", "n_1", "a", "metric"], rng.randint(0, 4))
    properties = {each: _parameter(rng, family) for each in names}
    required = [each for each in names if rng.random() < 0.5]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    is_strict = rng.random() < 0.5
    return {"type": "function", "function": {"name": name, "strict": is_strict, "parameters": schema}}


def _parameter(rng: random.Random, family: str) -> Schema:
    if family == "qwen3" and rng.random() < 0.4:  # text without quotes, of which other keywords are not followed
        return rng.choice([{"type": "string"}, {"type": "string", "enum": ["x", "two words", "é"]}])
    while True:
        schema = random_schema(rng, depth=1)
        if family != "qwen3" or "string" not in str(schema.get("type")):
            return schema


def answer(vocabulary: Vocabulary, constraint: TokenConstraint, rng: random.Random, begin: str = "") -> str | None:
    """A random answer that begins so; None: it did not end."""
    tokenizer = vocabulary.tokenizer
    begun = tokenizer.encode(begin, add_special=False) if begin else []
    for token in begun:
        allowed = allowed_tokens(constraint, vocabulary.vocab_size)
        assert token in allowed, f"{begin!r} is refused at {tokenizer.decode([token], False)!r}"
        constraint.accept(token)
    writer = RandomWriter(tokenizer, vocabulary.vocab_size, vocabulary.eos_ids, rng)
    written = write_answer(constraint, writer, vocabulary.vocab_size, vocabulary.eos_ids, max_tokens=800)
    return None if written is None else text_of(tokenizer, [*begun, *written], tokenizer.encode("the cat"))


def _begin(family: str, vocabulary: Vocabulary) -> str:
    if family == "granite" and vocabulary.tokenizer.special_id("<tool_call>") is None:
        return "the <|tool_call|>"
    return BEGINS.get(family, "the\n<tool_call>")


def calls_in(events: Sequence[Event]) -> list[tuple[str, str]]:
    names = [each.name for each in events if isinstance(each, CallBegin)]
    arguments = [
        "".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in range(len(names))
    ]
    return list(zip(names, arguments, strict=True))


def content_of(events: Sequence[Event]) -> str:
    return "".join(each.text for each in events if isinstance(each, Content))


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("asked", ["required", "named", "strict", "with a form"])
def test_random_calls(vocabulary: Vocabulary, family: str, asked: str, rng: random.Random) -> None:
    num_ended = 0
    for _ in range(6):
        tools, parallel = random_tools(rng, family), rng.random() < 0.5
        name = tools[0]["function"]["name"] if asked == "named" else None
        tools[-1]["function"]["strict"] |= asked == "strict"  # else text would be free
        content = StructuredOutputsParams(json=FORM) if asked == "with a form" else None
        choice = CallChoice(name, asked == "required", parallel)
        form = form_with_calls(tools, choice, TOOLS[family], vocabulary.tokenizer, content)
        assert form is not None and form.grammar is not None, "calls are not in the form"
        constraint = vocabulary.grammars.compile(answer_grammar(*form.rules))
        begin = _begin(family, vocabulary) if asked == "strict" else ""
        text = answer(vocabulary, constraint, rng, begin)
        if text is None:
            continue
        num_ended += 1
        parser = OutputParsers(None, TOOLS[family]).make("", tools)
        events = [*parser.push(text), *parser.finish()]
        called, rest = calls_in(events), content_of(events)
        if asked == "with a form" and not called:
            jsonschema.validate(json.loads(rest), FORM)
            continue
        assert called, f"no call in {text!r}"
        assert asked == "strict" or not rest.strip(), f"{rest!r} beside the calls of {text!r}"
        assert len(called) == 1 or (parallel and name is None), text
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
        for called_name, arguments in called:
            assert name in (None, called_name), text
            jsonschema.validate(json.loads(arguments), schemas[called_name])
    assert num_ended, "no answer has ended"


def test_calls_that_nothing_holds(rng: random.Random) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tokenizer = VOCABULARIES["byte level"].tokenizer
    assert form_with_calls(tools, CallChoice(), TOOLS["hermes"], tokenizer, None) is None
    form = StructuredOutputsParams(json=FORM)
    assert form_with_calls([], CallChoice(is_required=True), TOOLS["hermes"], tokenizer, form) is form


def test_keywords_that_are_not_understood(rng: random.Random) -> None:
    """They are left out, but for functions that are strict."""
    vocabulary = VOCABULARIES["byte level"]
    for is_strict in (False, True):
        schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
        tools = [{"type": "function", "function": {"name": "f", "strict": is_strict, "parameters": schema}}]
        form = form_with_calls(tools, CallChoice(is_required=True), TOOLS["hermes"], vocabulary.tokenizer, None)
        assert form is not None
        if not is_strict:
            vocabulary.grammars.compile(answer_grammar(*form.rules))
            continue
        with pytest.raises(UsageError, match="Unimplemented keys"):
            vocabulary.grammars.compile(answer_grammar(*form.rules))


@pytest.mark.parametrize("family", ["granite", "hermes", "qwen3", "mistral"])
def test_free_text_has_no_marks_of_other_calls(vocabulary: Vocabulary, family: str, rng: random.Random) -> None:
    """What the parser takes for a call is one, wherever text goes on."""
    tools = random_tools(rng, family)
    tools[-1]["function"]["strict"] = True
    form = form_with_calls(tools, CallChoice(), TOOLS[family], vocabulary.tokenizer, None)
    assert form is not None
    constraint = vocabulary.grammars.compile(answer_grammar(*form.rules))
    begun = constraint.copy()
    assert answer(vocabulary, begun, rng, "the cat {") is not None
    other = {"qwen3": "the <function=", "granite": "the <|tool_call|>looked<tool_call>looked"}.get(family, "")
    for mark in filter(None, (other, f"{_begin(family, vocabulary)}looked")):
        with pytest.raises(AssertionError, match="is refused"):
            answer(vocabulary, constraint.copy(), rng, mark)


REASONED = [
    ("qwen3", "assistant:", "<think>\nthe cat </thin\n</think>\n\n"),
    ("qwen3", "assistant:", ""),
    ("qwen3", "assistant:<think>\n", "the {cat}</think>"),
    ("qwen3", "assistant:<think>\n\n</think>\n\n", ""),
    ("deepseek_r1", "assistant:", "the cat</think>\n"),
    ("granite", "assistant:", "Here is my thought process: the cat\nHere is my response:\n"),
    ("granite", "assistant:", ""),
]


@pytest.mark.parametrize(("family", "prompt_end", "thoughts"), REASONED)
def test_forms_begin_behind_the_reasoning(
    vocabulary: Vocabulary, family: str, prompt_end: str, thoughts: str, rng: random.Random
) -> None:
    form = REASONING[family](prompt_end).form
    for _ in range(4):
        schema = random_schema(rng, 2)
        rules = StructuredOutputsParams(json=schema, disable_any_whitespace=True).rules
        text = answer(vocabulary, vocabulary.grammars.compile(answer_grammar(*rules, form)), rng, thoughts)
        if text is None:
            continue
        parser = OutputParsers(REASONING[family]).make(prompt_end)
        events = [*parser.push(text), *parser.finish()]
        assert bool(thoughts) == any(isinstance(each, Reasoning) for each in events), text
        jsonschema.validate(json.loads(content_of(events)), schema)


def test_no_end_within_the_reasoning(vocabulary: Vocabulary) -> None:
    """An answer with a form cannot end before it has one; thoughts that the prompt has begun cannot be left out."""
    assert REASONING["qwen3"]("<think></think>\n").form is None, "reasoning that has ended begins again"
    form = REASONING["qwen3"]("<think>").form
    constraint = vocabulary.grammars.compile(answer_grammar(*StructuredOutputsParams(choice=["1"]).rules, form))
    for token in vocabulary.tokenizer.encode("1 the cat", add_special=False):
        allowed = set(allowed_tokens(constraint, vocabulary.vocab_size).tolist())
        assert token in allowed and not allowed & set(vocabulary.eos_ids)
        constraint.accept(token)


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("form", [None, StructuredOutputsParams(json=FORM)])
def test_a_budget_ends_the_reasoning(
    vocabulary: Vocabulary, budget: int, form: StructuredOutputsParams | None, rng: random.Random
) -> None:
    tokenizer = vocabulary.tokenizer
    constraints = AnswerConstraints(tokenizer, vocabulary.vocab_size, vocabulary.grammars)
    params = SamplingParams(structured_outputs=form, thinking_token_budget=budget)
    prompt = tokenizer.encode("the cat<think>\n")
    constraint = constraints.make(params, prompt, REASONING["qwen3"])
    end = tokenizer.encode("</think>", add_special=False)
    written: list[int] = []
    while written[-len(end) :] != end:
        allowed = allowed_tokens(constraint, vocabulary.vocab_size)
        others = [token for token in allowed.tolist() if token not in (*end, *vocabulary.eos_ids)]
        is_forced = len(allowed) == 1
        assert is_forced or form or len(allowed) == vocabulary.vocab_size
        written.append(allowed[0] if is_forced else rng.choice(others))
        if rng.random() < 0.2:
            constraint = constraint.copy()
        constraint.accept(written[-1])
        assert len(written) < budget + len(end) + 5, f"{written} have no end"
    # With a form, it may be a character later.
    assert len(written) - len(end) >= budget and (form or len(written) - len(end) == budget)
    assert (len(allowed_tokens(constraint, vocabulary.vocab_size)) < 20) is (form is not None)


def test_budgets_without_reasoning(vocabulary: Vocabulary) -> None:
    constraints = AnswerConstraints(vocabulary.tokenizer, vocabulary.vocab_size, vocabulary.grammars)
    with pytest.raises(UsageError, match="whose reasoning is known"):
        constraints.make(SamplingParams(thinking_token_budget=3), [1], None)
    closed = constraints.make(
        SamplingParams(thinking_token_budget=0), vocabulary.tokenizer.encode("</think>"), REASONING["qwen3"]
    )
    assert len(allowed_tokens(closed, vocabulary.vocab_size)) == vocabulary.vocab_size
