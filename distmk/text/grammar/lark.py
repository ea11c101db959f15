"""Pieces of grammars in llguidance's variant of Lark (its docs/syntax.md).

An *expression* is what may stand on the right of a rule. A *rule text* is one or more rules, each on lines of its own. Here are
the expressions that a JSON schema, a regular expression, a list of choices or a user's own grammar become, and the whole grammar
of an answer, which may begin with reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OPTIONS = '%llguidance {"no_forcing": true}'
"""Any division of a forced text into tokens is allowed: a tokenizer's own division of text depends on what stands before it."""

WHITESPACE = r"[ \n\r\t]{1,128}"
"""White space between tokens of JSON. It is bounded, as some models never end it."""

_ESCAPES = {each: f"\\{each}" for each in "\\.+*?()|[]{}^$#&-~"} | {
    chr(code): f"\\x{code:02x}" for code in (*range(32), 127)
}


@dataclass(frozen=True)
class ReasoningForm:
    """How a model writes its reasoning. `regex`: the whole of it, which ends where it matches first. `end`: the text that ends
    it. `is_begun`: the prompt has begun it, so the answer cannot come at once.
    """

    regex: str
    end: str
    is_begun: bool = False


def answer_grammar(expression: str, rules: str = "", reasoning: ReasoningForm | None = None) -> str:
    """The grammar of a whole answer, whose content is `expression`. `rules`: those that the expression names."""
    lines = [OPTIONS]
    if reasoning is None:
        lines.append(f"start: {expression}")
    else:
        optional = "" if reasoning.is_begun else "?"
        # The parsers of answers leave out white space behind the reasoning.
        lines += [f"start: reasoning_{optional} AFTER_REASONING_ content_", f"content_: {expression}"]
        lines += [f"reasoning_[lazy]: {regex(reasoning.regex)}", r"AFTER_REASONING_: /[ \n]{0,2}/"]
    return "\n".join([*lines, rules]) + "\n"


def literal(text: str) -> str:
    """The expression of a text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def choice(texts: Iterable[str]) -> str:
    """The expression of one of several texts. Thousands of them are far cheaper as one regular expression."""
    return regex("|".join(escaped(text) for text in texts))


def regex(pattern: str) -> str:
    """The expression of a text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
    import llguidance

    return f"/{llguidance.regex_to_lark(pattern, '')}/"


def json_value(schema: Mapping[str, Any] | bool, **options: Any) -> str:
    """The expression of JSON that a schema describes. `options`: llguidance's, where the schema has none as x-guidance.

    ValueError: the schema is not JSON. RecursionError: it is nested too deeply.
    """
    given = {} if schema is True else {"not": {}} if schema is False else dict(schema)
    own = given.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    given["x-guidance"] = {"whitespace_pattern": WHITESPACE, **options, **own}
    if given["x-guidance"].get("whitespace_flexible") is False:
        given["x-guidance"].pop("whitespace_pattern", None)
    return "%json " + json.dumps(given, ensure_ascii=False, allow_nan=False)


def nested(grammar: str) -> str:
    """The expression of a whole grammar, with a `start` rule of its own."""
    return f"%lark {{\n{grammar}\n}}"


def until(mark: str) -> str:
    """The expression of a text up to the first `mark` and with it, in a rule that is `lazy`."""
    return regex(f"(?s:.*){escaped(mark)}")


def escaped(text: str) -> str:
    """The regular expression of a text."""
    return "".join(_ESCAPES.get(character, character) for character in text)
