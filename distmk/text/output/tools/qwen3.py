"""<function=f><parameter=x>value</parameter></function> in <tool_call> tags: Qwen3-Coder and Qwen3.5.

Values are not encoded: their types are those of the request's tools. With JSON in the tags, as Qwen3 writes it, this is Hermes'
format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from distmk.text.grammar.lark import choice, literal
from distmk.text.output.call_grammar import GAP, CallRequest, Function, Parameter, Rules, behind_mark
from distmk.text.output.families import family
from distmk.text.output.reader import Steps, TextReader
from distmk.text.output.tools.hermes import BEGIN, END, Hermes

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\r\n]*")


@family("qwen3", "qwen3_coder", "qwen3_xml")
class Qwen3(Hermes):
    """A parameter without its end tag ends where the next one begins. Arguments that are cut off stay open."""

    marks = (BEGIN, _FUNCTION)  # models leave out the first one at times

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template and _FUNCTION in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        """Values of type string stand without quotes: of their schemas, enum and const are followed."""
        rules = f"{request.one_of(_call)}\n{_STRING_RULES}"
        return behind_mark(request, BEGIN, f"{GAP} call_ {GAP} {request.mark(END)}", rules, without=_FUNCTION)

    def read(self, text: TextReader, mark: str) -> Steps[bool]:
        if mark == BEGIN:
            yield from text.spaces()
            if not (yield from text.take(_FUNCTION)):
                text.at = 0
                return (yield from super().read(text, mark))
        name = (yield from text.run(_NAME)).strip()
        if not name or not (yield from text.take(">")):
            return False
        text.commit()
        yield self.begin(name)
        yield from self._arguments(text, _types(self.tools, name))
        return True

    def _arguments(self, text: TextReader, types: Mapping[str, Any]) -> Steps[None]:
        yield self.arguments("{")
        separator, mark = "", None
        while True:
            if mark != _PARAMETER:
                mark = yield from text.until((_PARAMETER, _FUNCTION_END, END), lambda piece: None)
            if mark != _PARAMETER:
                break
            name = yield from text.run(_NAME)
            if not (yield from text.take(">")):
                break
            yield self.arguments(f"{separator}{_encoded(name.strip())}: ")
            separator = ", "
            mark = yield from self._value(text, types.get(name.strip(), "string"))
        if mark is not None:
            yield self.arguments("}")

    def _value(self, text: TextReader, kind: Any) -> Steps[str | None]:
        """Pass on a value; its first and last line breaks are the format's. Returns the mark behind it."""
        marks = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        yield from text.take("\n")
        if kind == "string" or (isinstance(kind, list) and "string" in kind):
            yield self.arguments('"')
            mark = yield from text.until(marks, lambda piece: self.arguments(_encoded(piece)[1:-1]), trims="\n")
            yield self.arguments(_encoded(text.trimmed[1:])[1:-1] + ('"' if mark else ""))
            return mark
        value: list[str] = []
        mark = yield from text.until(marks, value.append, trims="\n")
        if mark:
            yield self.arguments(_as_json("".join(value)))
        return mark


_STRING_RULES = r"""string_[lazy]: STRING_
STRING_: /(?s:.*)<\/parameter>/ & ~/(?s:.*)(<parameter=|<\/function>)(?s:.*)/"""


def _call(function: Function) -> str:
    parameters = function.parameters
    names = " ".join(each.rule if each.is_required else f"{each.rule}?" for each in parameters)
    head, end = literal(f"{_FUNCTION}{function.name}>\n"), literal(_FUNCTION_END)
    rules = [f"{each.rule}: {literal(f'{_PARAMETER}{each.name}>')} {_value(function, each)}" for each in parameters]
    return "\n".join([f"{head} {names} {end}", *rules])


def _value(function: Function, parameter: Parameter) -> str:
    """The expression of a value, from the line break in front to that behind its end tag."""
    kind, schema = parameter.type, parameter.schema if isinstance(parameter.schema, dict) else {}
    if kind != "string" and not (isinstance(kind, list) and "string" in kind):
        return f"{literal(chr(10))} {function.value(parameter.schema)} {literal(f'{chr(10)}{_PARAMETER_END}{chr(10)}')}"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return f"{literal(chr(10))} {choice(values)} {literal(f'{chr(10)}{_PARAMETER_END}{chr(10)}')}"
    return f"{literal(chr(10))} string_ {literal(chr(10))}"


def _encoded(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(value: str) -> str:
    """A value as JSON: as it is if it is some, else as text. Python's spellings of constants are JSON's."""
    plain = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(value.strip().lower(), value.strip())
    try:
        json.loads(plain, parse_constant=_refuse)
        return plain
    except (ValueError, RecursionError):
        return _encoded(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _types(tools: Any, name: str) -> Mapping[str, Any]:
    """The types of a tool's parameters; {} for a tool that the request does not have."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            if not isinstance(properties, dict):
                break
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}
    return {}
