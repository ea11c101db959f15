"""What takes the text of answers apart into reasoning, content and tool calls; exported for servers."""

from __future__ import annotations

from distmk.text.output.events import Arguments, CallBegin, Content, Event, Reasoning
from distmk.text.output.families import REASONING, TOOLS
from distmk.text.output.output_parser import AUTO, NONE, OutputParser, OutputParsers, choose_parsers, prompt_end

__all__ = [
    "AUTO",
    "NONE",
    "REASONING",
    "TOOLS",
    "Arguments",
    "CallBegin",
    "Content",
    "Event",
    "OutputParser",
    "OutputParsers",
    "Reasoning",
    "choose_parsers",
    "prompt_end",
]
