"""Grammars that would take hours or all memory are refused in one line, and the processes that find it are gone."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.grammar_tokenizers import VOCABULARIES
from support.random_answers import allowed_tokens

from distmk import StructuredOutputsParams, UsageError
from distmk.text.grammar import check
from distmk.text.grammar.check import check_grammar, end_processes
from distmk.text.grammar.lark import answer_grammar
from distmk.text.processes.frames import Limits
from distmk.text.processes.pool import ProcessPool

SMALL = Limits(cpu_s=0.4, memory_bytes=64 << 20)


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    end_processes()


def source(**form: Any) -> str:
    return answer_grammar(*StructuredOutputsParams(**form).rules)


def refusal(grammar: str, limits: Limits = SMALL, most_s: float = 5.0) -> str:
    """The line that refuses a grammar. AssertionError: it takes more than `most_s`."""
    begin = time.monotonic()
    with pytest.raises(UsageError) as failure:
        check_grammar(grammar, limits)
    assert time.monotonic() - begin < most_s
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_patterns_that_are_intersected() -> None:
    """Forty of them take llguidance eight minutes and 20 GB."""
    patterns = [{"type": "string", "pattern": f"^(.*a.{{{number}}}b.*)$"} for number in range(40)]
    said = refusal(source(json={"allOf": patterns}))
    assert said.startswith("structured_outputs cannot be compiled within 0.4 s and 64 MiB: it")
    check_grammar(source(choice=["a"]), SMALL)  # by another process


def test_an_enum_of_ten_megabytes() -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError, match="expected at most 1048576"):
        source(json={"enum": [f"{number} {'x' * 20}" for number in range(400_000)]})
    assert time.monotonic() - begin < 2
    assert "1048576" in refusal("x" * (check.MAX_BYTES + 1))


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "\n" * 20_000 + "a"},
        {"grammar": "a-" * 500_000},
        {"grammar": "a \t" * 300_000},
        {"regex": "(" * 1_000_000},
        {"regex": "/" * 1_000_000},
        {"choice": ["a" * 2_000_000]},
        {"choice": ["/"] * 500_000},
        {"grammar": "a" * 2_000_000},
    ],
)
def test_long_forms_are_read_in_little_time(form: dict[str, Any]) -> None:
    """The event loop of a server stands still meanwhile."""
    begin, made = time.thread_time(), None
    with contextlib.suppress(UsageError):
        made = StructuredOutputsParams(**form)
    assert time.thread_time() - begin < 0.2
    assert made is None or made.rules
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("depth", [150, 5000])
def test_schemas_that_are_nested_deeply(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(UsageError, match=r"nested too deeply|recursion limit"):
        check_grammar(source(json=schema))


def test_rules_and_brackets_that_are_nested_deeply() -> None:
    assert "nested" in refusal(source(grammar=f'start: {"(" * 50_000}"a"{")" * 50_000}'))
    assert "cannot be compiled" in refusal(source(regex=f"{'(' * 50_000}a{')' * 50_000}"))


def test_many_rules() -> None:
    rules = "\n".join(f'r{number}: "a{number}" | r{(number * 7 + 1) % 30_000}' for number in range(30_000))
    refusal(source(grammar=f"start: {' '.join(f'r{number}' for number in range(30_000))}\n{rules}"))


@pytest.mark.parametrize(
    "pattern", [r"(\w{1,500}\p{L}{1,500}){1,500}", r".*a.{1000}b", "(((a{1,1000}){1,1000}){1,1000})"]
)
def test_expressions_that_explode_while_they_are_followed(pattern: str) -> None:
    """Each mask takes a bounded time; where there are too many states, the answer ends with an error."""
    vocabulary, rng = VOCABULARIES["byte level"], random.Random()
    constraint = vocabulary.grammars.compile(source(regex=pattern))
    slowest = 0.0
    try:
        for _ in range(60):
            begin = time.thread_time()
            allowed = allowed_tokens(constraint, vocabulary.vocab_size)
            slowest = max(slowest, time.thread_time() - begin)
            constraint.accept(int(allowed[rng.randrange(len(allowed))]))
    except UsageError as error:
        assert str(error).startswith("structured_outputs cannot be followed any further: ") and "\n" not in str(error)
    assert slowest < 0.5


def test_a_process_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_pool", ProcessPool("distmk.no_such_module", "grammars"))
    assert refusal(source(choice=["a"])).startswith("structured_outputs cannot be compiled within")
