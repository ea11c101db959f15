"""Tool calls that models write as JSON: {"name": "f", "arguments": {...}}.

Arguments are passed on as the model writes them, piece by piece, also where they are not valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from distmk.text.output.events import Event
from distmk.text.output.families import ToolParser
from distmk.text.output.reader import SPACE, Steps, TextReader

_ARGUMENTS = ("arguments", "parameters")
_BESIDE_NAME = ("type", "id")  # keys with text that some models write in front of the arguments
_IN_STRING = re.compile(r'[^"\\]*')
_NESTED = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(r'[^"{}\[\],<\s]*')


class ValueScanner:
    """Finds the end of one JSON value, or of the rest of an object or list (`depth` 1). Brackets are counted, nothing more.

    `end`: a mark, beginning with <, that ends a broken value too, unless it stands in a string.
    """

    def __init__(self, end: str = "", depth: int = 0) -> None:
        self.done = False
        self._end = end
        self._depth = depth
        self._begun = False
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Where the value ends in `text`, which goes on at `at`, or where more text is needed."""
        while at < len(text) and not self.done:
            after = self._string(text, at) if self._in_string else self._outside(text, at)
            if after == at and not self.done and not self._in_string:
                break  # the beginning of the mark
            at = after
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at < len(text):
            self._escaped = text[at] == "\\"
            self._in_string = self._escaped
            self.done = not self._in_string and not self._depth
            at += 1
        return at

    def _outside(self, text: str, at: int) -> int:
        found = (_NESTED if self._depth else _SCALAR).match(text, at)
        assert found is not None
        self._begun |= found.end() > at
        at = found.end()
        letter = text[at : at + 1]
        if letter == "<" and self._end:
            self.done = text.startswith(self._end, at)
            if self.done or self._end.startswith(text[at:]):
                return at
        if not self._depth and (letter in ("}", "]", ",") or (letter in SPACE and letter and self._begun)):
            self.done = True
            return at
        self._begun |= bool(letter)
        self._in_string = letter == '"'
        self._depth += (letter in ("{", "[")) - (letter in ("}", "]"))
        self.done = letter in ("}", "]") and not self._depth
        return at + len(letter)


def read_call(text: TextReader, parser: ToolParser, end: str = "", any_order: bool = True) -> Steps[bool]:
    """Read one call at `text.at`. False: there is none; then `text.at` is behind what was read instead, without a commit.

    `end`: see `ValueScanner`. `any_order`: also a call whose arguments come before its name, which is passed on once it is
    whole. Without it, text that is no call is known early.
    """
    begin = text.at
    name = yield from _head(text)
    if name is not None:
        text.commit()
        yield parser.begin(name)
        yield from _pass_arguments(text, parser, end)
        yield from _scan(text, ValueScanner(end, depth=1))
        text.commit()
        return True
    text.at = begin
    if not any_order or (yield from text.peek()) != "{":
        return False
    call = _whole_call((yield from _scan(text, ValueScanner(end))))
    if call is None:
        return False
    text.commit()
    yield parser.begin(call[0])
    yield parser.arguments(call[1])
    return True


def read_calls(text: TextReader, parser: ToolParser) -> Steps[bool]:
    """Read a JSON list of calls at `text.at`. False: it does not begin with one, as of `read_call`.

    What follows instead of a later call is content.
    """
    if not (yield from text.take("[")):
        return False
    is_first = True
    while True:
        yield from text.spaces()
        if not is_first:
            text.commit()
        if not (yield from read_call(text, parser)):
            if not is_first:
                yield parser.rejected(text, "")
            return not is_first
        is_first = False
        yield from text.spaces()
        if not (yield from text.take(",")):
            yield from text.take("]")
            return True


def pass_value(text: TextReader, make: Callable[[str], Event], end: str = "") -> Steps[None]:
    """Pass on the JSON value at `text.at`; see `ValueScanner` for `end`. Commits."""
    yield from _scan(text, ValueScanner(end), make)


def _pass_arguments(text: TextReader, parser: ToolParser, end: str) -> Steps[None]:
    if (yield from text.peek()) != '"':
        yield from pass_value(text, parser.arguments, end)
        return
    # Some models encode the arguments once more, as clients get them.
    raw = yield from _scan(text, ValueScanner(end))
    decoded = _decoded(raw)
    text.commit()
    yield parser.arguments(decoded if isinstance(decoded, str) else raw)


def _head(text: TextReader) -> Steps[str | None]:
    """The name of a call whose name comes first, consumed up to the arguments; None: it does not begin so."""
    if not (yield from text.take("{")):
        return None
    name = None
    while True:
        yield from text.spaces()
        key = yield from _read_string(text)
        yield from text.spaces()
        if not (yield from text.take(":")):
            return None
        yield from text.spaces()
        if key in _ARGUMENTS and name is not None:
            return name
        value = (yield from _read_string(text)) if key == "name" or key in _BESIDE_NAME else None
        if value is None:
            return None
        name = value if key == "name" else name
        yield from text.spaces()
        if not (yield from text.take(",")):
            return None


def _read_string(text: TextReader) -> Steps[str | None]:
    if (yield from text.peek()) != '"':
        return None
    decoded = _decoded((yield from _scan(text, ValueScanner())))
    return decoded if isinstance(decoded, str) else None


def _scan(text: TextReader, scanner: ValueScanner, make: Callable[[str], Event] | None = None) -> Steps[str]:
    """Consume a value. With `make`, pass its pieces on and commit; else return it whole."""
    begin = text.at
    while True:
        start = text.at
        text.at = scanner.scan(text.text, start)
        if make is not None:
            if text.at > start:
                yield make(text.text[start : text.at])
            text.commit()
        if scanner.done or not (yield from text.more()):
            break
    value = "" if make else text.text[begin : text.at]
    if not scanner.done:
        text.at = len(text.text)  # what is left began the end mark
    return value


def _whole_call(raw: str) -> tuple[str, str] | None:
    """The name and the arguments of a call; None: it is none."""
    call = _decoded(raw)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments: Any = next((call[key] for key in _ARGUMENTS if key in call), {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _decoded(raw: str) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
