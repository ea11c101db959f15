"""{"name": "f", "parameters": {...}}, several divided by semicolons: Llama 3.1 to 3.3, at times behind <|python_tag|>."""

from __future__ import annotations

from distmk.text.output.call_grammar import CallRequest, Rules, as_json, at_beginning
from distmk.text.output.events import Content
from distmk.text.output.families import ToolParser, family
from distmk.text.output.json_calls import read_call
from distmk.text.output.reader import SPACE, Steps, TextReader

_TAG = "<|python_tag|>"


@family("llama3_json", "llama4_json")
class Llama3Json(ToolParser):
    """Calls stand at the beginning of the text or behind the tag; JSON elsewhere, or of another kind, is content."""

    shows_special_tokens = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return '"parameters": dictionary of argument name' in template or _TAG in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        call = request.one_of(lambda function: as_json(function, "parameters"))
        return at_beginning(request, request.repeated("call_", '"; "'), "{", call, _TAG)

    def parse(self, text: TextReader) -> Steps[None]:
        yield from text.spaces()
        text.at = 0 if not (yield from self._calls(text)) else text.at
        while (yield from text.until((_TAG,), Content, trims=SPACE, trims_end=self.num_calls > 0)) is not None:
            before = text.trimmed + _TAG
            if not (yield from self._calls(text)):
                yield self.rejected(text, before)

    def _calls(self, text: TextReader) -> Steps[bool]:
        """Read calls; False: there are none."""
        begin = self.num_calls
        while True:
            start = text.at
            yield from text.spaces()
            if not (yield from read_call(text, self, any_order=False)):
                text.at = start
                return self.num_calls > begin
            yield from text.spaces()
            if not (yield from text.take(";")):
                return True
