"""Grammars token by token: what random tokens within a grammar spell is in it, by `jsonschema`, `re` and Python's own parser."""

from __future__ import annotations

import ast
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.grammar_tokenizers import VOCABULARIES, Vocabulary
from support.random_answers import RandomWriter, allowed_tokens, text_of, write_answer
from support.random_schemas import random_regex, random_schema

from distmk import StructuredOutputsParams, UsageError
from distmk.engine.token_constraint import TokenConstraint
from distmk.text.grammar import compiler as compiler_module
from distmk.text.grammar.compiler import GrammarConstraint
from distmk.text.grammar.lark import answer_grammar

PROMPT = "the cat"


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


@pytest.fixture
def rng() -> random.Random:
    return random.Random()


def begun(vocabulary: Vocabulary, **form: Any) -> GrammarConstraint:
    """The beginning of an answer of this form."""
    return vocabulary.grammars.compile(answer_grammar(*StructuredOutputsParams(**form).rules))


def answers(vocabulary: Vocabulary, constraint: GrammarConstraint, rng: random.Random, count: int = 3) -> list[str]:
    """Random answers that have ended."""
    context = vocabulary.tokenizer.encode(PROMPT)
    writer = RandomWriter(vocabulary.tokenizer, vocabulary.vocab_size, vocabulary.eos_ids, rng)
    size, ends = vocabulary.vocab_size, vocabulary.eos_ids
    written = [write_answer(constraint.copy(), writer, size, ends, max_tokens=600) for _ in range(count)]
    return [text_of(vocabulary.tokenizer, tokens, context) for tokens in written if tokens is not None]


def test_random_schemas(vocabulary: Vocabulary, rng: random.Random) -> None:
    num_ended = 0
    for _ in range(25):
        schema = random_schema(rng)
        flexible = rng.random() < 0.5
        for answer in answers(vocabulary, begun(vocabulary, json=schema, disable_any_whitespace=not flexible), rng):
            num_ended += 1
            value = json.loads(answer)
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            outside = re.sub(r'"(\\.|[^"\\])*"', "", answer)
            assert flexible or not re.search(r"\s", outside), f"{answer!r} of {schema}"
    assert num_ended > 35


def test_random_regular_expressions(vocabulary: Vocabulary, rng: random.Random) -> None:
    num_ended = 0
    for _ in range(40):
        pattern = random_regex(rng)
        for answer in answers(vocabulary, begun(vocabulary, regex=pattern), rng):
            num_ended += 1
            assert re.fullmatch(pattern, answer), f"{answer!r} of {pattern!r}"
    assert num_ended > 60


def test_masks_are_exact(vocabulary: Vocabulary, rng: random.Random) -> None:
    """All tokens of every mask, against all texts that can be chosen."""
    tokenizer, size = vocabulary.tokenizer, vocabulary.vocab_size
    context = tokenizer.encode(PROMPT)
    letters = [*'ab\n"\\/é漢🙂\x7f\x01{.*', " the", " sing", "<tool_call>", "<|end|>", "</"]
    texts = {"".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(12)} or {"a"}
    choices = {text.encode() for text in texts}
    constraint, written = begun(vocabulary, choice=sorted(texts)), b""
    writer = RandomWriter(tokenizer, size, vocabulary.eos_ids, rng)
    ids: list[int] = []
    while True:
        allowed = set(allowed_tokens(constraint, size).tolist())
        expected = set(vocabulary.eos_ids) if written in choices else set()
        for token in set(range(size)) - set(vocabulary.eos_ids):
            spelled = b"" if tokenizer.is_special(token) else _spelled(vocabulary, [*context, *ids], token)
            if spelled and any(each.startswith(written + spelled) for each in choices):
                expected.add(token)
        assert allowed == expected, f"behind {written!r} of {choices}: tokens {sorted(allowed ^ expected)}"
        token = writer.choose(np.array(sorted(allowed)))
        constraint.accept(token)
        if token in vocabulary.eos_ids:
            break
        written += _spelled(vocabulary, [*context, *ids], token)
        ids.append(token)
    assert written in choices


def _spelled(vocabulary: Vocabulary, before: list[int], token: int) -> bytes:
    """What a token adds, by the library's own decoder for whole characters."""
    tokenizer = vocabulary.tokenizer
    if tokenizer.spells_bytes(token):
        return tokenizer.token_bytes(token)
    whole, part = (
        tokenizer.decode([before[0], before[0], token], False),
        tokenizer.decode([before[0], before[0]], False),
    )
    return whole[len(part) :].encode()


def test_a_grammar_in_lark(vocabulary: Vocabulary, rng: random.Random) -> None:
    grammar = """start: sum
        sum: product (("+" | "-") product)*
        product: atom ("*" atom)*
        atom: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,2}/"""
    made = answers(vocabulary, begun(vocabulary, grammar=grammar), rng, count=20)
    assert len(made) > 8
    for answer in made:
        tree = ast.parse(answer, mode="eval")
        assert set(answer) <= set("0123456789+-*()") and not any(
            isinstance(node, ast.UnaryOp | ast.Call | ast.Pow) for node in ast.walk(tree)
        ), answer


def test_objects_of_any_kind(vocabulary: Vocabulary, rng: random.Random) -> None:
    made = answers(vocabulary, begun(vocabulary, json_object=True), rng, count=20)
    assert made and all(isinstance(json.loads(answer), dict) for answer in made)


def test_white_space_and_additional_properties(rng: random.Random) -> None:
    vocabulary = VOCABULARIES["byte level"]
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}}}}
    closed = begun(vocabulary, json=schema, disable_additional_properties=True, whitespace_pattern=r"\t{2}")
    made = answers(vocabulary, closed, rng, count=20)
    assert made
    given = {"const": {"properties": {"a": 1}}}  # a value, and a property that has a keyword's name
    named = {"type": "object", "properties": {"properties": given}, "required": ["properties"]}
    begin = begun(vocabulary, json=named, disable_additional_properties=True, disable_any_whitespace=True)
    assert set(answers(vocabulary, begin, rng)) == {'{"properties":{"properties":{"a":1}}}'}
    for answer in made:
        value = json.loads(answer)
        assert set(value) <= {"a"} and set(value.get("a", {})) <= {"b"}, answer
        assert set(re.findall(r"\s+", answer)) <= {"\t\t"}, repr(answer)


def test_a_complete_answer_can_only_end(vocabulary: Vocabulary) -> None:
    constraint = begun(vocabulary, choice=["1", "é"])
    for token in vocabulary.tokenizer.encode("é", add_special=False)[-2:]:
        if token in allowed_tokens(constraint, vocabulary.vocab_size):
            constraint.accept(token)
    assert constraint.is_complete
    assert set(allowed_tokens(constraint, vocabulary.vocab_size).tolist()) == set(vocabulary.eos_ids)


def test_special_tokens_are_no_text() -> None:
    """Their text is spelled by other tokens."""
    vocabulary = VOCABULARIES["byte fallback"]
    special = vocabulary.tokenizer.special_id("<tool_call>")
    text = allowed_tokens(begun(vocabulary, choice=["<tool_call>"]), vocabulary.vocab_size)
    assert special is not None and special not in text and len(text)
    named = allowed_tokens(begun(vocabulary, grammar='start: <tool_call> "a"'), vocabulary.vocab_size)
    assert named.tolist() == [special]


def test_copies_go_their_own_ways(vocabulary: Vocabulary, rng: random.Random) -> None:
    first = begun(vocabulary, regex="[0-9]+x|[a-f]+y")
    second = first.copy()
    digit, letter = (vocabulary.tokenizer.encode(each, add_special=False)[-1] for each in "1a")
    first.accept(digit)
    second.accept(letter)
    assert digit in allowed_tokens(first, vocabulary.vocab_size) and letter not in allowed_tokens(
        first, vocabulary.vocab_size
    )
    assert letter in allowed_tokens(second, vocabulary.vocab_size)
    with pytest.raises(UsageError, match="cannot be followed any further"):
        second.accept(digit)


def test_compiled_grammars_are_kept_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(compiler_module, "check_grammar", checked.append)
    vocabulary = VOCABULARIES["byte level"]
    for number in [*range(80), 79, 0]:
        begun(vocabulary, choice=[f"{number}"])
    assert len(checked) == 81, "the last ones are kept, and the first ones are not"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "no form"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": "{"}, "no JSON"),
        ({"json": 3}, "expected a JSON schema"),
        ({"json": {"const": float("nan")}}, "no JSON"),
        ({"json": {"enum": [json.loads("[" * 900 + "]" * 900)]}}, "recursion limit"),
        ({"json": {"enum": ["x" * 100 + str(number) for number in range(100_000)]}}, "expected at most 1048576"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": 3}, "expected text"),
        ({"choice": [], "grammar": None}, "one or more texts"),
        ({"choice": [1]}, "one or more texts"),
        ({"choice": "a"}, "one or more texts"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": 'root ::= "a"'}, "expected Lark"),
        ({"structural_tag": "{}"}, '"triggers"'),
        ({"whitespace_pattern": "(", "json": {}}, "unclosed group"),
        ({"json": {}, "disable_any_whitespace": 3}, "True or False"),
        ({"jsn": {}}, "did you mean json?"),
    ],
)
def test_what_is_no_form(form: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as failure:
        begun(VOCABULARIES["byte level"], **form)
    assert says in str(failure.value) and "\n" not in str(failure.value) and len(str(failure.value)) < 500


def test_a_structural_tag(rng: random.Random) -> None:
    vocabulary = VOCABULARIES["byte level"]
    tag = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    given = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["<f="]})
    constraint = begun(vocabulary, structural_tag=given)
    for text in ("hello ", "<f=a>", "12", "</f> the"):
        _write(vocabulary, constraint, text)
    assert constraint.is_complete
    _write(vocabulary, constraint, " <f=")
    assert not constraint.is_complete
    with pytest.raises(UsageError):
        _write(vocabulary, constraint, "b>")


def _write(vocabulary: Vocabulary, constraint: TokenConstraint, text: str) -> None:
    for token in vocabulary.tokenizer.encode(text, add_special=False):
        constraint.accept(token)
