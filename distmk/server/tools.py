"""What a chat request may ask of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distmk.errors import shown
from distmk.server.errors import ApiError
from distmk.server.state import ServerState

_FREE = 'tools are called as the model likes: send "auto" or "none"'
_CONSTRAINED = "needs constrained decoding, which is not there yet"


def check_tools(state: ServerState, tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    """ApiError: the request wants calls to be forced or their arguments to be checked, or the model's calls are not known."""
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
        raise ApiError(400, f"tool_choice is {shown(choice)}, which {_CONSTRAINED}; {_FREE}", "tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice is {shown(choice)}; {_FREE}", "tool_choice")
    for index, tool in enumerate(tools or ()):
        if _is_strict(tool):
            message = f"tools[{index}] is strict, which {_CONSTRAINED}; leave strict out, or send strict: false"
            raise ApiError(400, message, "tools")
    if tools and state.parsers.tools is None:
        message = "tools is given, but no parser fits the calls of this model's chat template"
        raise ApiError(400, f'{message}; start the server with --tool-call-parser, or send tool_choice "none"', "tools")


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, dict) and function.get("strict")))
