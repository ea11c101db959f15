"""The message of one choice of a chat, in OpenAI's form: whole, and as the deltas of a stream."""

from __future__ import annotations

from typing import Any

from distmk import TokenOutput
from distmk.api.output_parsers import Arguments, CallBegin, Content, Event, Reasoning
from distmk.server.answer_reader import AnswerReader


class ChatMessage:
    """`has_reasoning`: the model's reasoning is told apart from its answers. `shows_reasoning`: the client wants to see it."""

    def __init__(self, reader: AnswerReader, has_reasoning: bool, shows_reasoning: bool = True) -> None:
        self._reader = reader
        self._has_reasoning = has_reasoning
        self._shows_reasoning = shows_reasoning
        self._begun = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    def add(self, output: TokenOutput) -> list[dict[str, Any]]:
        """The deltas that a token adds. The first one names the role, also where there is nothing to show yet."""
        deltas = [delta for event in self._reader.read(output) if (delta := self._delta(event)) is not None]
        if not self._begun:
            self._begun = True
            first = deltas[0] if deltas else {}
            # As by OpenAI, the content of a message that may turn out to have none is null.
            content = {} if "reasoning_content" in first else {"content": None if self._reader.divides else ""}
            deltas = [{"role": "assistant", **content, **first}, *deltas[1:]]
        return deltas

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case Reasoning(text):
                self._reasoning.append(text)
                return {"reasoning_content": text} if self._shows_reasoning else None
            case CallBegin():
                self._calls.append((event, []))
                return {"tool_calls": [{"index": event.index, **_call(event, "")}]}
            case Arguments(index, text):
                self._calls[index][1].append(text)
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's reason for the engine's: a message that ended by itself and calls tools waits for their answers."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def whole(self) -> dict[str, Any]:
        """The message so far."""
        content = "".join(self._content)
        has_more = bool(self._calls or self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": None if has_more and not content else content}
        message |= {"refusal": None, "annotations": []}
        if self._has_reasoning and self._shows_reasoning:
            message["reasoning_content"] = "".join(self._reasoning) or None
        if self._calls:
            message["tool_calls"] = [_call(call, "".join(arguments)) for call, arguments in self._calls]
        return message


def _call(begin: CallBegin, arguments: str) -> dict[str, Any]:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}
