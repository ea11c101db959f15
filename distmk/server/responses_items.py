"""The output of a response: items that grow with the model's text, and the events that tell a client of it."""

from __future__ import annotations

import copy
from typing import Any

from distmk import TokenOutput
from distmk.api.output_parsers import Arguments, CallBegin, Content, Event, Reasoning
from distmk.server.answer_reader import AnswerReader
from distmk.server.openai_logprobs import chat_logprobs, scored

Items = list[dict[str, Any]]


class ResponseItems:
    """Items of a response, in the order in which the model writes them: reasoning, messages, calls of functions.

    `id_suffix`: makes their ids unique. `num_logprobs`: of the most probable tokens, log probabilities of which are shown with
    those of the text's own; None: none at all.
    """

    def __init__(self, reader: AnswerReader, id_suffix: str, num_logprobs: int | None) -> None:
        self.items: Items = []
        self._reader = reader
        self._id_suffix = id_suffix
        self._num_logprobs = num_logprobs
        self._texts: list[str] = []  # of the last item
        self._logprobs: Items = []
        self._unsent: Items = []  # log probabilities of tokens whose text has not come yet
        self._is_open = False  # whether the last item goes on

    def add(self, output: TokenOutput) -> Items:
        """The events that a token adds, and with the last one, those that end the output."""
        read = self._reader.read(output)
        if self._num_logprobs is not None and output.logprobs is not None and not self._reader.is_reasoning:
            token = scored(output.token_id, output.logprobs)
            self._unsent += chat_logprobs([token] if token else [], self._num_logprobs)["content"]
        events = [each for event in read for each in self._read(event)]
        if output.finish_reason is not None:
            if not self.items:
                events += self._open_message()
            events += self._close("incomplete" if output.finish_reason == "length" else "completed")
        return events

    def _read(self, event: Event) -> Items:
        match event:
            case Content(text):
                return [*self._open_message(), self._text_delta(text)]
            case Reasoning(text):
                self._unsent.clear()  # of the tag that begins it
                return [*self._open_reasoning(), self._delta("response.reasoning_text", text)]
            case CallBegin():
                self._unsent.clear()
                return self._open_call(event)
            case Arguments(_, text):
                return [self._delta("response.function_call_arguments", text)]

    def _open_message(self) -> Items:
        item: dict[str, Any] = {"id": self._id("msg"), "type": "message", "role": "assistant", "content": []}
        return self._open_part(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _open_reasoning(self) -> Items:
        item: dict[str, Any] = {
            "id": self._id("rs"),
            "type": "reasoning",
            "summary": [],
            "content": [],
            "encrypted_content": None,
        }
        return self._open_part(item, {"type": "reasoning_text", "text": ""})

    def _open_part(self, item: dict[str, Any], part: dict[str, Any]) -> Items:
        """The events that begin an item of text, unless one of its kind is open."""
        if self._is_open and self.items[-1]["type"] == item["type"]:
            return []
        events = self._open(item)
        item["content"].append(part)
        return [*events, {"type": "response.content_part.added", **self._place(), "part": dict(part)}]

    def _open_call(self, begin: CallBegin) -> Items:
        call = {"type": "function_call", "call_id": begin.call_id, "name": begin.name, "arguments": ""}
        return self._open({"id": self._id("fc"), **call})

    def _open(self, item: dict[str, Any]) -> Items:
        events = self._close("completed")
        self.items.append(item)
        item["status"] = "in_progress"
        self._is_open, self._texts, self._logprobs = True, [], []
        return [*events, {"type": "response.output_item.added", **self._index(), "item": copy.deepcopy(item)}]

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": f"{kind}.delta", **self._place(), "delta": text}

    def _text_delta(self, text: str) -> dict[str, Any]:
        logprobs, self._unsent = self._unsent, []
        self._logprobs += logprobs
        return {**self._delta("response.output_text", text), "logprobs": logprobs}

    def _close(self, status: str) -> Items:
        """The events that end the last item."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text, place = self.items[-1], "".join(self._texts), self._place()
        item["status"] = status
        done = {"type": "response.output_item.done", **self._index(), "item": item}
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            return [{"type": kind, **place, "name": item["name"], "arguments": text}, done]
        part = item["content"][0]
        part["text"] = text
        logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        part |= logprobs
        ended = {"type": f"response.{part['type']}.done", **place, "text": text, **logprobs}
        return [ended, {"type": "response.content_part.done", **place, "part": part}, done]

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        """Where the last item is, and its part if it has some."""
        item = self.items[-1]
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], **self._index(), **part}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._id_suffix}{len(self.items)}"
