"""Stop strings in generated text, wherever the tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence

from distmk.errors import UsageError

MAX_STRINGS = 64  # each is looked for in every text
MAX_CHARS = 4096


def check_stop_strings(stop: Sequence[str]) -> None:
    """UsageError: there are more than MAX_STRINGS, or one has more than MAX_CHARS characters, or none."""
    if len(stop) > MAX_STRINGS:
        raise UsageError(f"stop has {len(stop)} strings; expected at most {MAX_STRINGS}")
    for text in stop:
        if not 1 <= len(text) <= MAX_CHARS:
            raise UsageError(f"stop has a string of {len(text)} characters; expected 1 to {MAX_CHARS}")


class StopStrings:
    """Releases text up to the first stop string; text that may begin one is held back until it is known.

    The result does not depend on how the text is cut into pieces. The first stop string is the one that ends first; of several
    that end at the same character, the one that begins first. Every character costs a few steps for each stop string, whatever
    their lengths (Knuth, Morris, Pratt 1977).

    `stop`: see `check_stop_strings`. `include`: the stop string itself is released too (vLLM's `include_stop_str_in_output`).
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        check_stop_strings(stop)
        self._matchers = [_Matcher(text) for text in stop]
        self._include = include
        self._held = ""
        self.met: str | None = None  # the stop string that ended the text

    def push(self, text: str, active: bool = True) -> str:
        """The text that is released after `text`; "" once a stop string was met.

        `active=False`: no stop string may contain a character of `text` (vLLM's `min_tokens`).
        """
        if self.met is not None:
            return ""
        if not active:
            for matcher in self._matchers:
                matcher.num_matched = 0
            return self.flush() + text
        for position, character in enumerate(text):
            ended = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if ended:
                self.met = max(ended, key=len)
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: -len(self.met)]
        seen = self._held + text
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held]

    def flush(self) -> str:
        """The text held back: no more follows."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Finds the end of one stop string: `num_matched` is the length of its longest prefix that ends the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallbacks(stop)

    def push(self, character: str) -> bool:
        """Whether the stop string ends with `character`."""
        count = self.num_matched
        while count and self.stop[count] != character:
            count = self._fallback[count]
        if self.stop[count] == character:
            count += 1
        self.num_matched = count
        return count == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """For each length of a prefix of `stop`, the length of the longest shorter prefix that it ends with."""
    lengths = [0, 0]
    for character in stop[1:]:
        count = lengths[-1]
        while count and stop[count] != character:
            count = lengths[count]
        lengths.append(count + 1 if stop[count] == character else 0)
    return lengths
