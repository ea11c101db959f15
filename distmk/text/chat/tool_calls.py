"""Tool calls that a client sends in a conversation: their arguments become the object that templates read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from distmk.errors import UsageError, one_line, shown
from distmk.text.chat.plain_values import plain

_FUNCTION = 'expected {"type": "function", "function": {"name": text, "arguments": JSON text}}'


def read_tool_calls(given: Any, what: str) -> list[dict[str, Any]]:
    """The tool calls of the message `what`, plain values, with `arguments` as objects.

    OpenAI's clients send them as JSON text, which templates would encode again. UsageError: they are no list of calls.
    """
    if not isinstance(given, list):
        raise UsageError(f"the tool_calls of {what} are {shown(given)}; expected a list")
    return [_read_call(call, f"tool call {index} of {what}") for index, call in enumerate(given)]


def read_function(given: Any, what: str) -> dict[str, Any]:
    """A function with its `arguments` as an object; {} if they are absent or blank, as in vLLM. UsageError: it is none."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise UsageError(f"{what} is {shown(given)}; {_FUNCTION}")
    return {**given, "arguments": _read_arguments(given.get("arguments"), what)}


def _read_call(given: Any, what: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{what} is {shown(given)}; {_FUNCTION}")
    if "function" not in given and "name" in given:  # the short form that templates of some models read
        return read_function(given, what)
    return {**given, "function": read_function(given.get("function"), what)}


def _read_arguments(given: Any, what: str) -> dict[str, Any]:
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            given = plain(json.loads(given, parse_constant=_refuse_constant), f"the arguments of {what}")
        except (ValueError, RecursionError) as error:
            problem = one_line(error)
            raise UsageError(f"the arguments of {what} are not valid JSON ({problem}); send a JSON object") from None
    if not isinstance(given, dict):
        raise UsageError(f"the arguments of {what} are {shown(given)}; expected a JSON object, as text or as it is")
    return given


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
