"""`StructuredOutputsParams`: the form that an answer is held to, in vLLM's words, and OpenAI's `response_format`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from distmk.absent_parameters import TUNES, Absent, takes_absent
from distmk.errors import UsageError, shown
from distmk.parameter_checks import flag, text
from distmk.text.grammar import lark
from distmk.text.grammar.check import MAX_BYTES
from distmk.text.grammar.structural_tag import structural_tag_rules

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ABSENT: Mapping[str, Absent] = dict.fromkeys(("disable_fallback", "backend", "_backend"), TUNES)
_ANY_OBJECT = {"type": "object"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""

_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


@takes_absent(_ABSENT)
@dataclass
class StructuredOutputsParams:
    """The form of an answer: one of the first six. Names are vLLM's. UsageError: a wrong value, or not one form.

    json: a JSON schema, as a dict, a pydantic model or text. regex: what matches the whole answer, in the syntax of Rust's
    `regex`. choice: one of these texts. grammar: in Lark, as llguidance reads it. json_object: any JSON object.
    structural_tag: calls in free text, as JSON text {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.

    Of JSON: `disable_any_whitespace` allows no white space between its parts; else there may be up to 128 characters at a
    place, or what the regular expression `whitespace_pattern` matches. `disable_additional_properties`: objects have the
    properties that their schemas name and no others.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise UsageError(
                f"structured_outputs has {' and '.join(given) or 'no form'}; expected one of {', '.join(_FORMS)}"
            )
        self.disable_any_whitespace = flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        name = "structured_outputs.disable_additional_properties"
        self.disable_additional_properties = flag(name, self.disable_additional_properties)
        for name in ("regex", "grammar", "whitespace_pattern", "structural_tag"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, text(f"structured_outputs.{name}", value))
                _check_size(f"structured_outputs.{name}", len(value))
        if self.choice is not None:
            self.choice = _texts("structured_outputs.choice", self.choice)
            _check_size("structured_outputs.choice", sum(map(len, self.choice)))
        if self.grammar is not None and _GBNF.search(self.grammar):
            raise UsageError(
                "structured_outputs.grammar is in GBNF or EBNF (::=); expected Lark, as llguidance reads it"
            )
        if self.json is not None:
            self.json = _schema(self.json)

    @property
    def rules(self) -> tuple[str, str]:
        """The expression of an answer, and the rules that it names (`lark.answer_grammar`). UsageError: it has none."""
        if self.structural_tag is not None:
            return structural_tag_rules(self.structural_tag)
        if self.regex is not None:
            return lark.regex(self.regex), ""
        if self.choice is not None:
            return lark.choice(self.choice), ""
        if self.grammar is not None:
            return lark.nested(self.grammar), ""
        return self._json_value(), ""

    def _json_value(self) -> str:
        schema: Any = json.loads(self.json) if isinstance(self.json, str) else self.json or _ANY_OBJECT
        if self.disable_additional_properties:
            schema = _closed(schema)
        options: dict[str, Any] = {"whitespace_flexible": False} if self.disable_any_whitespace else {}
        if self.whitespace_pattern is not None:
            options = {"whitespace_pattern": self.whitespace_pattern}
        return lark.json_value(schema, **options)

    @classmethod
    def of_mapping(cls, given: Mapping[str, Any], what: str = "structured_outputs") -> StructuredOutputsParams:
        """The parameters in a JSON object. UsageError: one is wrong or unknown."""
        known = {each.name for each in fields(cls)} | set(_ABSENT)
        if unknown := sorted(set(given) - known):
            raise UsageError(f"{what} has {shown(unknown[0])}; expected one of {', '.join(_FORMS)}")
        return cls(**{name: value for name, value in given.items() if value is not None})


def read_response_format(given: Any, what: str = "response_format") -> StructuredOutputsParams | None:
    """OpenAI's `response_format`, or `text.format` of its responses; None: the answer is free text.

    UsageError: it is neither text, json_object nor json_schema.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(given))
    inner = given.get("json_schema", given) if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict | bool):
        expected = '{"type": "json_schema", "json_schema": {"name": text, "schema": JSON schema}}'
        raise UsageError(f'{what} is {shown(given)}; expected {expected}, or the type "text" or "json_object"')
    return StructuredOutputsParams(json=schema)  # type: ignore[arg-type]


def _texts(name: str, given: Any) -> list[str]:
    """UsageError: `given` is no list of texts."""
    is_list = isinstance(given, list | tuple) and len(given) > 0
    if not is_list or not all(isinstance(each, str) for each in given):
        raise UsageError(f"{name} is {shown(given)}; expected a list of one or more texts")
    return list(given)


def _schema(given: Any) -> str:
    """A JSON schema as text. UsageError: it is none."""
    expected = "expected a JSON schema"
    if hasattr(given, "model_json_schema"):  # a pydantic model
        given = given.model_json_schema()
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        if not isinstance(schema, dict | bool):
            raise UsageError(f"structured_outputs.json is {shown(given)}; {expected}")
        written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise UsageError("structured_outputs.json is nested too deeply; expected a simpler schema") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"structured_outputs.json is no JSON ({error}); {expected}") from None
    _check_size("structured_outputs.json", len(written))
    return written


def _check_size(name: str, num_chars: int) -> None:
    """UsageError: a form is too large to be looked at in passing."""
    if num_chars > MAX_BYTES:
        raise UsageError(f"{name} has {num_chars} characters; expected at most {MAX_BYTES}")


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            closed[name] = {key: _closed(inner) for key, inner in value.items()}
        else:
            closed[name] = value if name in _VALUES else _closed(value)
    if closed.keys() & {"properties", "patternProperties"}:
        closed.setdefault("additionalProperties", False)
    return closed
