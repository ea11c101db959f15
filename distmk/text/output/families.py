"""What parsers of model families have in common, and their registry.

A family is one class in one module of `reasoning` or `tools`. It is found by being there: by its name, or by the chat
template of the model.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from distmk.text.grammar.lark import ReasoningForm
from distmk.text.output.call_grammar import CallRequest, Rules
from distmk.text.output.events import Arguments, CallBegin, Content, Event
from distmk.text.output.reader import Steps, TextReader


class Parser:
    """Turns text into events. `parse` is the family's own; after it all text is content."""

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes in the family's format."""
        raise NotImplementedError

    def __init__(self) -> None:
        self._reader = TextReader()
        self._steps = self._all()

    def parse(self, text: TextReader) -> Steps[None]:
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        """The events that are certain after one more piece of text."""
        self._reader.text += text
        return self._advance()

    def finish(self) -> list[Event]:
        """The events that were held back, once the text has ended."""
        self._reader.ended = True
        return self._advance()

    def _all(self) -> Steps[None]:
        yield from self.parse(self._reader)
        yield from self._reader.until((), Content)

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events


class ReasoningParser(Parser):
    """Divides text into reasoning and content. `prompt_end`: the end of the prompt, which may have begun the reasoning."""

    def __init__(self, prompt_end: str = "") -> None:
        self.prompt_end = prompt_end.rstrip()
        self.is_reasoning = False  # whether the next text belongs to the reasoning, as far as is known
        super().__init__()

    @property
    def form(self) -> ReasoningForm | None:
        """How the model writes reasoning behind this prompt, for answers that have a grammar; None: it writes none."""
        raise NotImplementedError


class ToolParser(Parser):
    """Divides content into content and tool calls. `tools`: those of the request, in OpenAI's form."""

    shows_special_tokens: ClassVar[bool] = (
        False  # marks of the format are special tokens, which texts leave out otherwise
    )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
        self.num_calls = 0
        super().__init__()

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        """The grammar of answers with calls, in this format."""
        raise NotImplementedError

    @staticmethod
    def make_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    def begin(self, name: str) -> CallBegin:
        self.num_calls += 1
        return CallBegin(self.num_calls - 1, self.make_id(), _sound(name))

    def rejected(self, text: TextReader, before: str) -> Content:
        """The content that a mark is whose text, read up to `text.at`, is no call. `before`: the mark, and what led to it.

        It is not searched for further marks, as reading it again and again could take long.
        """
        content = Content(before + text.text[: text.at])
        text.commit()
        return content

    def arguments(self, text: str) -> Arguments:
        """A piece of the arguments of the last call."""
        return Arguments(self.num_calls - 1, _sound(text))


def _sound(text: str) -> str:
    """Text that UTF-8 can carry: halves of surrogate pairs, which escapes may stand for, become question marks."""
    return text.encode("utf-8", "replace").decode()


Registered = TypeVar("Registered", bound=type[Parser])

REASONING: dict[str, type[ReasoningParser]] = {}
TOOLS: dict[str, type[ToolParser]] = {}
"""Families by name."""


def family(*names: str) -> Callable[[Registered], Registered]:
    """Register a parser under its name, and under further names that vLLM has for its format."""

    def register(cls: Registered) -> Registered:
        registry: dict[str, Any] = REASONING if issubclass(cls, ReasoningParser) else TOOLS
        registry.update(dict.fromkeys(names, cls))
        return cls

    return register
