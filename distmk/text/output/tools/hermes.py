"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3, SmolLM3."""

from __future__ import annotations

from distmk.text.output.call_grammar import GAP, CallRequest, Rules, as_json, behind_mark
from distmk.text.output.events import Content
from distmk.text.output.families import ToolParser, family
from distmk.text.output.json_calls import read_call
from distmk.text.output.reader import SPACE, Steps, TextReader

BEGIN, END = "<tool_call>", "</tool_call>"


@family("hermes")
class Hermes(ToolParser):
    """Tags around text that is no call are content."""

    shows_special_tokens = True  # in some models
    marks: tuple[str, ...] = (BEGIN,)

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template and "<function=" not in template and "<|tool_call|>" not in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        call = request.one_of(lambda function: as_json(function, "arguments"))
        return behind_mark(request, BEGIN, f"{GAP} call_ {GAP} {request.mark(END)}", call)

    def parse(self, text: TextReader) -> Steps[None]:
        while True:
            mark = yield from text.until(self.marks, Content, trims=SPACE, trims_end=self.num_calls > 0)
            if mark is None:
                return
            before = text.trimmed + mark
            if (yield from self.read(text, mark)):
                yield from text.spaces()
                yield from text.take(END)
            else:
                yield self.rejected(text, before)

    def read(self, text: TextReader, mark: str) -> Steps[bool]:
        """Read the call behind a mark. False: there is none."""
        yield from text.spaces()
        return (yield from read_call(text, self, END))
