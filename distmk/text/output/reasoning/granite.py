"""Here is my thought process: reasoning Here is my response: answer: Granite 3.2 with `thinking`.

Quantised models write "Here's" at times. Without the first sentence all is the answer.
"""

from __future__ import annotations

from distmk.text.grammar.lark import ReasoningForm
from distmk.text.output.events import Reasoning
from distmk.text.output.families import ReasoningParser, family
from distmk.text.output.reader import SPACE, Steps, TextReader

_BEGIN = ("Here is my thought process:", "Here's my thought process:")
_END = ("Here is my response:", "Here's my response:")


@family("granite")
class Granite(ReasoningParser):
    @classmethod
    def fits(cls, template: str) -> bool:
        return _BEGIN[0] in template

    @property
    def form(self) -> ReasoningForm | None:
        return ReasoningForm(rf"\s*({'|'.join(_BEGIN)})(?s:.*)({'|'.join(_END)})", _END[0])

    def parse(self, text: TextReader) -> Steps[None]:
        yield from text.spaces()
        for sentence in _BEGIN:
            if (yield from text.take(sentence)):
                break
        else:
            text.at = 0
            return
        self.is_reasoning = True
        yield from text.spaces()
        yield from text.until(_END, Reasoning, trims=SPACE)
        self.is_reasoning = False
        yield from text.spaces()
