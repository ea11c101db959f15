"""What a chat request may ask of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distmk.api.answer_forms import CallChoice
from distmk.errors import shown
from distmk.server.errors import ApiError
from distmk.server.state import ServerState

_EXPECTED = 'expected "auto", "none", "required", or {"type": "function", "function": {"name": text}}'


def read_choice(
    state: ServerState, tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool
) -> CallChoice | None:
    """What the request says of calls; None: it has no tools.

    ApiError: the choice is none, or of a function that is not there, or the model's calls are not known.
    """
    name = _name(choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if name is None and choice not in (None, "auto", "none", "required"):
        raise ApiError(400, f"tool_choice is {shown(choice)}; {_EXPECTED}", "tool_choice")
    if not tools:
        if name is not None or choice == "required":
            raise ApiError(400, f"tool_choice is {shown(choice)}, and there are no tools; give tools", "tool_choice")
        return None
    if state.parsers.tools is None:
        message = "tools is given, but no parser fits the calls of this model's chat template"
        raise ApiError(400, f'{message}; start the server with --tool-call-parser, or send tool_choice "none"', "tools")
    if name is not None and name not in map(_name, tools):
        raise ApiError(400, f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
    return CallChoice(name, choice == "required", parallel)


def _name(tool: Mapping[str, Any]) -> Any:
    """The name of a function, as chats or responses have it."""
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, dict) else None
