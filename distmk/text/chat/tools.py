"""Tools that a request offers to the model: functions, as OpenAI's API describes them."""

from __future__ import annotations

from typing import Any

from distmk.errors import UsageError, shown
from distmk.text.chat.plain_values import is_list, plain, value_name

_EXPECTED = 'expected {"type": "function", "function": {"name": text, "description": text, "parameters": JSON schema}}'


def read_tools(given: Any) -> list[dict[str, Any]]:
    """Tools as new plain objects, for templates. UsageError: they are no list of functions; the line begins with `tools`."""
    if not is_list(given):
        raise UsageError(f"tools is {value_name(given)}; expected a list of tools")
    return [_read_tool(plain(tool, f"tools[{index}]"), f"tools[{index}]") for index, tool in enumerate(given)]


def _read_tool(tool: Any, what: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise UsageError(f"tools has {shown(tool)} as {what}; {_EXPECTED}")
    function = {key: value for key, value in tool["function"].items() if key != "strict"}  # it is not for the model
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(f"tools has {shown(function.get('name'))} as the name of {what}; {_EXPECTED}")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UsageError(f"tools has {shown(function['parameters'])} as the parameters of {what}; {_EXPECTED}")
    return {**tool, "function": function}
