"""Grammars of tool calls: what the formats of model families have in common.

A family's own part is in its module of `tools`: how one call of a function is written, and where calls stand in an answer. All
here are expressions and rules in Lark, see `distmk.text.grammar.lark`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distmk.text.grammar.lark import escaped, json_value, literal, regex, until

Rules = tuple[str, str]
"""The expression of an answer, and the rules that it names."""

GAP = r"/[ \n]{0,2}/"
"""White space that models write around calls, or leave out."""

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that may be called. `schema`: of its arguments, an object. `is_strict`: keywords of the schema that cannot be
    followed are an error, and not left out.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    number: int = 0  # among those of a request, for the names of its rules

    @property
    def arguments(self) -> str:
        """The expression of its arguments as JSON. ValueError, RecursionError: as of `json_value`."""
        return self.value(self.schema or _NO_ARGUMENTS)

    def value(self, schema: Mapping[str, Any] | bool) -> str:
        """The expression of a JSON value, with the definitions of the function's schema."""
        shared = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        whole = {**shared, **({"not": {}} if schema is False else {} if schema is True else schema)}
        return json_value(whole, **({} if self.is_strict else {"lenient": True}))

    @property
    def parameters(self) -> list[Parameter]:
        """Its parameters in the order of the schema, for formats that write them one by one."""
        properties, required = self.schema.get("properties"), self.schema.get("required")
        named = properties if isinstance(properties, dict) else {}
        needed = required if isinstance(required, list) else []
        return [
            Parameter(name, schema, name in needed, f"f{self.number}_{index}")
            for index, (name, schema) in enumerate(named.items())
        ]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function. `rule`: a name for its rule in the grammar."""

    name: str
    schema: Mapping[str, Any] | bool
    is_required: bool
    rule: str

    @property
    def type(self) -> Any:
        return self.schema.get("type") if isinstance(self.schema, dict) else None


@dataclass(frozen=True)
class CallRequest:
    """What calls a request allows.

    is_required: the answer is calls and nothing else. content: the expression of an answer without calls; None: free text, in
    which calls may stand. parallel: there may be several. special_id: the id of a special token of this text, or None.
    """

    functions: Sequence[Function]
    is_required: bool
    parallel: bool
    special_id: Callable[[str], int | None]
    content: str | None = None

    def mark(self, text: str) -> str:
        """The expression of a text of the format, which may be a special token."""
        token = self.special_id(text)
        return literal(text) if token is None else f"<[{token}]>"

    def one_of(self, write: Callable[[Function], str]) -> str:
        """The rule `call_`: any function, as `write` has it. It may have further rules on further lines."""
        names = [f"function_{number}" for number in range(len(self.functions))]
        rules = [f"{name}: {write(function)}" for name, function in zip(names, self.functions, strict=True)]
        return "\n".join([f"call_: {' | '.join(names)}", *rules])

    def repeated(self, call: str, between: str) -> str:
        """The expression of one call, or of several where they are allowed."""
        return f"{call} ({between} {call})*" if self.parallel else call


def as_json(function: Function, arguments_key: str) -> str:
    """A call as a JSON object, in the spelling of the templates."""
    head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{arguments_key}": '
    return f"{literal(head)} {function.arguments} {literal('}')}"


def list_behind_mark(request: CallRequest, mark: str, without: str = "") -> Rules:
    """An answer whose calls are a JSON list behind one mark; see `behind_mark`."""
    call = request.one_of(lambda function: as_json(function, "arguments"))
    calls = f"/ ?/ {literal('[')} {request.repeated('call_', '/, ?/')} {literal(']')}"
    return behind_mark(request, mark, calls, call, repeats=False, without=without)


def behind_mark(
    request: CallRequest, mark: str, calls: str, rules: str, repeats: bool = True, without: str = ""
) -> Rules:
    """An answer whose calls stand behind a mark each, or with `repeats` False behind one mark together.

    calls: the expression of what follows the mark. In free text, what looks like the mark begins a call. without: what free text
    must not have, as parsers would take it for a call.
    """
    lines = [f"called_: {calls}", rules]
    begun = f"{request.mark(mark)} called_"
    alone = request.repeated(begun, GAP) if repeats else begun
    if request.is_required:
        return alone, "\n".join(lines)
    if request.content is not None:
        return "calls_ | content_of_", "\n".join([f"calls_: {alone}", f"content_of_: {request.content}", *lines])
    several = request.parallel and repeats
    if request.special_id(mark) is not None:
        lines.append(f"TEXT_: /(?s:.+)/{_without(without)}")
        return (f"(TEXT_? {begun})* TEXT_?" if several else f"TEXT_? {begun} | TEXT_?"), "\n".join(lines)
    lines += ["until_[lazy]: UNTIL_", f"UNTIL_: {until(mark)}{_without(without)}"]
    lines.append(f"TEXT_: /(?s:.*)/{_without(without)}")
    return ("(until_ called_)* TEXT_" if several else "until_ called_ | TEXT_"), "\n".join(lines)


def _without(text: str) -> str:
    """What makes a terminal one that does not contain `text`."""
    return f" & ~{regex(f'(?s:.*){escaped(text)}(?s:.*)')}" if text else ""


def at_beginning(request: CallRequest, calls: str, first: str, rules: str, tag: str | None = None) -> Rules:
    """An answer that is calls, which begin with the character `first`, or has none. `tag`: calls also stand behind it."""
    begun = f"{request.mark(tag)} calls_" if tag and request.special_id(tag) is not None else None
    lines = [f"calls_: {calls}", rules]
    alone = f"({begun} | calls_)" if begun else "calls_"
    if request.is_required:
        return alone, "\n".join(lines)
    if request.content is not None:
        return f"{alone} | content_of_", "\n".join([f"content_of_: {request.content}", *lines])
    lines.append(rf"TEXT_: /\s*[^\s\{first}](?s:.*)/")
    return f"{GAP} {alone} | TEXT_?" + (f" | TEXT_ {begun}" if begun else ""), "\n".join(lines)
