"""<think>reasoning</think>answer: Qwen3, SmolLM3, and others whose templates show these tags.

The template may begin the reasoning at the end of the prompt (Qwen3 Thinking), or end it there (enable_thinking false). Else the
model writes both tags, or answers at once.
"""

from __future__ import annotations

from distmk.text.grammar.lark import ReasoningForm
from distmk.text.output.events import Reasoning
from distmk.text.output.families import ReasoningParser, family
from distmk.text.output.reader import SPACE, Steps, TextReader

OPEN, CLOSE = "<think>", "</think>"


@family("qwen3")
class Qwen3(ReasoningParser):
    """Reasoning that is cut off has no end, and is reasoning all the same."""

    @classmethod
    def fits(cls, template: str) -> bool:
        return CLOSE in template and not cls.is_deepseek(template)

    @staticmethod
    def is_deepseek(template: str) -> bool:
        """DeepSeek's templates write the assistant's turn with a full-width bar."""
        return "<｜Assistant｜>" in template

    def begins_inside(self) -> bool:
        """Whether the text is reasoning from its first character on."""
        return self.prompt_end.endswith(OPEN)

    @property
    def form(self) -> ReasoningForm | None:
        if self.begins_inside():
            return ReasoningForm(f"(?s:.*){CLOSE}", CLOSE, is_begun=True)
        ended = self.prompt_end.endswith(CLOSE)
        return None if ended else ReasoningForm(rf"\s*{OPEN}(?s:.*){CLOSE}", CLOSE)

    def parse(self, text: TextReader) -> Steps[None]:
        self.is_reasoning = self.begins_inside()
        yield from text.spaces()
        if (yield from text.take(OPEN)):
            self.is_reasoning = True
            yield from text.spaces()
        elif not self.is_reasoning:
            text.at = 0
            return
        yield from text.until((CLOSE,), Reasoning, trims=SPACE)
        self.is_reasoning = False
        yield from text.spaces()
