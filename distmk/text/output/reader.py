"""Text that comes in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It yields events, and None to wait for more text. What it does may depend on the text alone, and not
on where the pieces end; the methods here keep to that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from distmk.text.output.events import Event

T = TypeVar("T")

Steps = Generator[Event | None, None, T]
"""A part of a parser, which returns a T."""

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class TextReader:
    """The text that is not consumed yet: `text` from `at` on. A parser may go back to an earlier `at` until it commits."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.trimmed = ""  # what `until` left out in front of its mark

    def commit(self) -> None:
        """Forget the text before `at`, which becomes 0."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Wait for more text, or for the end. False: it has ended before."""
        if self.ended:
            return False
        yield None
        return True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def take(self, literal: str) -> Steps[bool]:
        """Whether `literal` follows, which is then consumed."""
        while True:
            follows = self.text[self.at : self.at + len(literal)]
            if follows == literal:
                self.at += len(literal)
                return True
            if not literal.startswith(follows) or not (yield from self.more()):
                return False

    def run(self, kind: re.Pattern[str]) -> Steps[str]:
        """Consume all that `kind`, a repeated class of characters, matches."""
        begin = self.at
        while True:
            found = kind.match(self.text, self.at)
            assert found is not None  # it may match nothing
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return self.text[begin : self.at]

    def spaces(self) -> Steps[str]:
        """Consume white space."""
        return (yield from self.run(_SPACES))

    def until(
        self, marks: Sequence[str], make: Callable[[str], Event | None], trims: str = "", trims_end: bool = False
    ) -> Steps[str | None]:
        """Pass on the text in front of the first of `marks` through `make`. Returns the mark, consumed; None: the text ended.

        `make` may return None, for text that is no event. `trims`: characters that are left out right before a mark, and with
        `trims_end` before the end; `trimmed` has them. Commits.
        """
        self.trimmed = ""
        while True:
            self.commit()
            found = min(((at, mark) for mark in marks if (at := self.text.find(mark)) >= 0), default=None)
            end = len(self.text) if self.ended or found else _certain(self.text, marks)
            end = found[0] if found else end
            trimming = trims and (found or trims_end or not self.ended)
            kept = len(self.text[:end].rstrip(trims)) if trimming else end
            if kept and (event := make(self.text[:kept])) is not None:
                yield event
            if found:
                self.trimmed, self.at = self.text[kept:end], end + len(found[1])
                self.commit()
                return found[1]
            self.at = end if self.ended else kept
            if not (yield from self.more()):
                return None


def _certain(text: str, marks: Sequence[str]) -> int:
    """The length of `text` without an end that may be the beginning of a mark."""
    longest = max(map(len, marks), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)
