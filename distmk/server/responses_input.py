"""The input of /v1/responses as messages and tools of a chat, which the model's template reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distmk.errors import shown
from distmk.server.errors import ApiError

Messages = list[dict[str, Any]]

_MESSAGE = '{"role": "user", "content": text}'
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_input(given: Any, instructions: str | None) -> Messages:
    """The messages of a conversation: instructions first. Items of one answer (reasoning, text, calls) become one message.

    ApiError: an item is wrong, or of a kind that this server does not have.
    """
    messages: Messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise _wrong(f"input is {shown(given)}; expected text, or a list of items")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise _wrong(f"input[{index}] is {shown(item)}; expected an item such as {_MESSAGE}")
        kind = item.get("type") or "message"
        read = _ITEMS.get(kind) if isinstance(kind, str) else None
        if read is None:
            what = "answers are not stored here" if kind == "item_reference" else f"expected one of {', '.join(_ITEMS)}"
            raise _wrong(f"input[{index}] has the type {shown(kind)}; {what}")
        read(messages, item, f"input[{index}]")
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")  # it has reasoning alone
    return messages


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> Messages | None:
    """Functions in the form of chats. ApiError: a tool is no function."""
    return [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)] if given else None


def _read_tool(tool: Mapping[str, Any], what: str) -> dict[str, Any]:
    if tool.get("type") != "function" or "function" in tool:
        expected = '{"type": "function", "name": text, "description": text, "parameters": JSON schema}'
        raise _wrong(f"tools has {shown(tool)} as {what}; expected {expected}", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _read_message(messages: Messages, item: Mapping[str, Any], what: str) -> None:
    content = _read_content(item.get("content"), what)
    if item.get("role") == "assistant":
        _answer(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": item.get("role"), "content": content})


def _read_reasoning(messages: Messages, item: Mapping[str, Any], what: str) -> None:
    parts = item.get("content") or item.get("summary") or []
    text = _read_content(parts, what)
    if text:
        _answer(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = _joined(text)


def _read_call(messages: Messages, item: Mapping[str, Any], what: str) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = _answer(messages).setdefault("tool_calls", [])
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _read_output(messages: Messages, item: Mapping[str, Any], what: str) -> None:
    output = item.get("output")
    if not isinstance(output, str | list):
        output = json.dumps(output, ensure_ascii=False)
    content = _read_content(output, what)
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})


_ITEMS: Mapping[str, Callable[[Messages, Mapping[str, Any], str], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def _answer(messages: Messages, *without: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one, unless it has one of the keys `without` already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(key in last for key in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _read_content(content: Any, what: str) -> Any:
    """The text of a message, or its parts in the form of chats."""
    return [_read_part(part, what) for part in content] if isinstance(content, list) else content


def _read_part(part: Any, what: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict) and kind in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if isinstance(part, dict) and kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    raise _wrong(f"the content of {what} has {shown(kind)}; this model takes text: expected input_text or output_text")


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)


def _wrong(message: str, param: str = "input") -> ApiError:
    return ApiError(400, message, param)
