"""[TOOL_CALLS] and a JSON list of calls (tokenizers up to v7), or [TOOL_CALLS]f{...} for each call (from v11 on): Mistral.

Newer models write [ARGS] in front of the arguments, and some [CALL_ID] and an id before it.
"""

from __future__ import annotations

import re
import secrets
import string

from distmk.text.grammar.lark import literal
from distmk.text.output.call_grammar import CallRequest, Rules, behind_mark, list_behind_mark
from distmk.text.output.events import Content
from distmk.text.output.families import ToolParser, family
from distmk.text.output.json_calls import pass_value, read_calls
from distmk.text.output.reader import SPACE, Steps, TextReader

_MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")
_LETTERS = string.ascii_letters + string.digits


@family("mistral")
class Mistral(ToolParser):
    shows_special_tokens = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return _MARK in template

    @classmethod
    def rules(cls, request: CallRequest) -> Rules:
        """Tokenizers with [ARGS] are those of models that write a mark for each call."""
        if request.special_id(_ARGS) is not None:
            args = request.mark(_ARGS)
            call = request.one_of(lambda function: f"{literal(function.name)} {args} {function.arguments}")
            return behind_mark(request, _MARK, "call_", call)
        return list_behind_mark(request, _MARK)

    @staticmethod
    def make_id() -> str:
        """Templates refuse ids of another length than 9."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.until((_MARK,), Content, trims=SPACE, trims_end=self.num_calls > 0)) is not None:
            before = text.trimmed + _MARK
            yield from text.spaces()
            is_list = (yield from text.peek()) == "["
            if not (yield from (read_calls(text, self) if is_list else self._named(text))):
                yield self.rejected(text, before)

    def _named(self, text: TextReader) -> Steps[bool]:
        """Read a call that begins with its name; False: there is none."""
        name = yield from text.run(_NAME)
        if name and (yield from text.take("[CALL_ID]")):
            yield from text.run(_NAME)
        if name:
            yield from text.take(_ARGS)
        yield from text.spaces()
        if not name or (yield from text.peek()) != "{":
            return False
        text.commit()
        yield self.begin(name)
        yield from pass_value(text, self.arguments)
        return True
