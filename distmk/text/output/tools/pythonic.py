"""[f(x=1), g(y="a")], a list of calls in Python: Llama 4 (within <|python_start|>), and others that were trained so."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from distmk.text.grammar.lark import literal
from distmk.text.output.call_grammar import CallRequest, Function, Rules, at_beginning
from distmk.text.output.families import ToolParser, family
from distmk.text.output.reader import Steps, TextReader

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.]*")
_PLAIN = re.compile(r"""[^()\[\]{}'"]*""")
_CONSTANTS = {"true": True, "false": False, "null": None}  # as JSON spells them


@family("pythonic", "llama4_pythonic")
class Pythonic(ToolParser):
    """The list is the whole text. A call is passed on once it is whole; from one that is wrong or cut off, all is content."""

    @classmethod
    def fits(cls, template: str) -> bool:
        return _BEGIN in template or "[func_name1(params_name1=" in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        several = request.repeated("call_", literal(", "))
        calls = f'"[" {several} "]"'
        if request.special_id(_BEGIN) is not None:
            calls = f"{request.mark(_BEGIN)}? {calls} {request.mark(_END)}?"
        return at_beginning(request, calls, "[", request.one_of(_call))

    def parse(self, text: TextReader) -> Steps[None]:
        yield from text.spaces()
        if (yield from text.take(_BEGIN)):
            yield from text.spaces()
        if not (yield from text.take("[")) or not (yield from self._call(text)):
            text.at = 0
            return
        while True:
            yield from text.spaces()
            if not (yield from text.take(",")):
                break
            yield from text.spaces()
            if not (yield from self._call(text)):
                return
        yield from text.take("]")
        yield from text.spaces()
        yield from text.take(_END)
        yield from text.spaces()

    def _call(self, text: TextReader) -> Steps[bool]:
        """Read one call; False: there is none, and nothing is consumed."""
        begin = text.at
        name = yield from text.run(_NAME)
        if name and (yield from text.peek()) == "(":
            start = text.at
            yield from _brackets(text)
            call = _arguments("f" + text.text[start : text.at])
            if call is not None:
                text.commit()
                yield self.begin(name)
                yield self.arguments(call)
                return True
        text.at = begin
        return False


def _call(function: Function) -> str:
    """The expression of a call, and the rules of its parameters: optional ones may be left out, but their order stays."""
    rules, first, after = [], "", ""
    for parameter in reversed(function.parameters):
        value = "/True|False/" if parameter.type == "boolean" else function.value(parameter.schema)
        given = f"{parameter.rule}: {literal(parameter.name + '=')} {value}"
        begins = f"{parameter.rule} {parameter.rule}_after" + ("" if parameter.is_required else f" | {first}")
        optional = "" if parameter.is_required else "?"
        rules += [given, f"{parameter.rule}_after: {after}", f"{parameter.rule}_first: {begins}"]
        first, after = f"{parameter.rule}_first", f'(", " {parameter.rule}){optional} {parameter.rule}_after'
    return "\n".join([f"{literal(function.name + '(')} {first} {literal(')')}", *rules])


def _brackets(text: TextReader) -> Steps[None]:
    """Consume text up to the bracket that closes the first one, or to the end."""
    depth, quote = 0, ""
    while letter := (yield from text.peek()):
        text.at += 1
        if quote:
            if letter == "\\" and (yield from text.peek()):
                text.at += 1
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if not depth:
                return
            yield from text.run(_PLAIN)


def _arguments(call: str) -> str | None:
    """The arguments of a call, as a JSON object; None: they have no names, or are no plain values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not have
            node = ast.parse(call, mode="eval").body
        if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
            return None
        values = {str(each.arg): _value(each.value) for each in node.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Any:
    """ValueError, TypeError: it is no plain value."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)
