"""<|tool_call|> and a JSON list of calls: Granite 3; later ones write <tool_call>."""

from __future__ import annotations

from distmk.text.output.call_grammar import CallRequest, Rules, list_behind_mark
from distmk.text.output.events import Content
from distmk.text.output.families import ToolParser, family
from distmk.text.output.json_calls import read_calls
from distmk.text.output.reader import SPACE, Steps, TextReader

_MARKS = ("<|tool_call|>", "<tool_call>")


@family("granite")
class Granite(ToolParser):
    shows_special_tokens = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return _MARKS[0] in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        mark, other = _MARKS if request.special_id(_MARKS[1]) is None else _MARKS[::-1]
        return list_behind_mark(request, mark, without="" if request.special_id(other) else other)

    def parse(self, text: TextReader) -> Steps[None]:
        while True:
            mark = yield from text.until(_MARKS, Content, trims=SPACE, trims_end=self.num_calls > 0)
            if mark is None:
                return
            before = text.trimmed + mark
            yield from text.spaces()
            if not (yield from read_calls(text, self)):
                yield self.rejected(text, before)
