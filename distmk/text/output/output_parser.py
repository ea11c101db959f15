"""The parser of one choice, and the choice of parsers for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import distmk.text.output.reasoning  # registers its families
import distmk.text.output.tools  # noqa: F401 (likewise)
from distmk.errors import UsageError, shown
from distmk.text.output.events import Arguments, CallBegin, Content, Event, merged
from distmk.text.output.families import REASONING, TOOLS, Parser, ReasoningParser, ToolParser
from distmk.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"

_PROMPT_END_TOKENS = 16  # more than the tags at the end of a prompt have

P = TypeVar("P", bound=Parser)


class OutputParser:
    """Turns the text of one choice into events, the same ones however it is cut into pieces, but for where theirs end.

    Tool calls are looked for behind the reasoning. `parallel`: False keeps the first call alone.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, parallel: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def divides(self) -> bool:
        """Whether text may be something else than content."""
        return self._reasoning is not None or self._tools is not None

    def push(self, text: str) -> list[Event]:
        """The events that are certain after one more piece of text."""
        if self._reasoning is None:
            return self._read([Content(text)])
        return self._read(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """The events that were held back, once the text has ended."""
        events = [] if self._reasoning is None else self._reasoning.finish()
        return self._read(events, ends=True)

    def _read(self, events: list[Event], ends: bool = False) -> list[Event]:
        read: list[Event] = []
        for event in events:
            read += self._tools.push(event.text) if self._tools and isinstance(event, Content) else [event]
        if self._tools and ends:
            read += self._tools.finish()
        return merged([event for event in read if self._keeps(event)])

    def _keeps(self, event: Event) -> bool:
        if isinstance(event, CallBegin | Arguments) and event.index and not self._parallel:
            return False
        return isinstance(event, CallBegin) or bool(event.text)


@dataclass(frozen=True)
class OutputParsers:
    """The families of a model's parsers; None: its text is not divided."""

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None

    def make(
        self, prompt_end: str, tools: Sequence[Mapping[str, Any]] | None = None, parallel: bool = True
    ) -> OutputParser:
        """The parser of one choice. `tools`: those of the request; None: calls are not looked for."""
        return OutputParser(
            self.reasoning(prompt_end) if self.reasoning else None,
            self.tools(tools) if self.tools and tools is not None else None,
            parallel,
        )


def prompt_end(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """The end of a prompt's text, by which parsers of reasoning see whether it has begun."""
    return tokenizer.decode(prompt_ids[-_PROMPT_END_TOKENS:], skip_special=False)


def choose_parsers(template: str, reasoning: str = AUTO, tools: str = AUTO) -> OutputParsers:
    """Parsers by their names, or for `auto` those that fit the model's chat templates. UsageError: there is no such name."""
    return OutputParsers(
        _choose(REASONING, reasoning, template, "reasoning parser"), _choose(TOOLS, tools, template, "tool call parser")
    )


def _choose(families: Mapping[str, type[P]], name: str, template: str, what: str) -> type[P] | None:
    if name == AUTO:
        return next((each for each in families.values() if each.fits(template)), None)
    if name != NONE and name not in families:
        raise UsageError(f"there is no {what} {shown(name)}; expected auto, none, {', '.join(families)}")
    return families.get(name)
