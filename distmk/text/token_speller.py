"""The bytes that a token adds to a text: the same token adds others at its beginning, and behind other tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distmk.text.tokenizer import Tokenizer

_MAX_WINDOW = 4
"""Tokens before a token that its bytes may depend on; a character has at most as many bytes."""


class TokenSpeller:
    """Spells the tokens of one sequence in turn. Joined, their bytes are the UTF-8 of the text that all of them decode to.

    A token cannot be decoded alone. Most tokenizers drop the space of the first word. WordPiece writes a space in front of
    every other word. A token may be a part of a character. Bytes that are not UTF-8 stay unchanged.

    `skip_special`: special tokens add nothing, and tokens behind them are spelled as if these were not there. `context`: tokens
    before the first one pushed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._before = self._end_of(context)

    @property
    def tail(self) -> bytes:
        """The end of the bytes so far, exact where it is an incomplete character."""
        return b"".join(map(self._tokenizer.token_bytes, self._before))

    def push(self, token_id: int) -> bytes:
        """The bytes of `token_id`, which is now the last token."""
        spelled = self.spell(token_id)
        if self._is_visible(token_id):
            self._before = (*self._before, token_id)[-_MAX_WINDOW:]
        return spelled

    def spell(self, token_id: int) -> bytes:
        """The bytes that `token_id` would add as the next token; b"": a special token that is skipped, or none of the model."""
        if not self._is_visible(token_id):
            return b""
        tokenizer = self._tokenizer
        if tokenizer.spells_bytes(token_id):
            spelled_bytes = tokenizer.token_bytes(token_id)
            if self._before or spelled_bytes != b" ":  # which the decoder may drop in front
                return spelled_bytes
        if not tokenizer.only_first_differs:
            return self._added_by(token_id)
        key = (bool(self._before), token_id)
        spelled = tokenizer.spelled.get(key)
        if spelled is None:
            spelled = tokenizer.spelled[key] = self._added_by(token_id)
        return spelled

    def name_of_hidden(self, token_id: int) -> bytes:
        """How a special token that adds nothing is shown; b"" for any other."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer.is_special(token_id) else b""

    def _added_by(self, token_id: int) -> bytes:
        """The difference that a token makes to the text of those before it."""
        before, whole = (self._tokenizer.decode(ids, False) for ids in (self._before, (*self._before, token_id)))
        alone = not self._before or not whole.startswith(before)
        return (self._tokenizer.decode([token_id], False) if alone else whole[len(before) :]).encode()

    def _is_visible(self, token_id: int) -> bool:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return False
        return bool(self._tokenizer.token_bytes(token_id))

    def _end_of(self, context: Sequence[int]) -> tuple[int, ...]:
        end: list[int] = []
        for token_id in reversed(context):
            if self._is_visible(token_id):
                end.insert(0, token_id)
            if len(end) == _MAX_WINDOW:
                break
        return tuple(end)


def spell_all(tokenizer: Tokenizer, token_ids: Iterable[int], skip_special: bool = True) -> list[bytes]:
    """The bytes of every token of a text."""
    speller = TokenSpeller(tokenizer, skip_special)
    return [speller.push(token_id) for token_id in token_ids]


def token_strings(tokenizer: Tokenizer, token_ids: Iterable[int]) -> list[str]:
    """The tokens of a text for users to read: the text that each adds, or the name of a special token."""
    speller, shown = TokenSpeller(tokenizer), []
    for token_id in token_ids:
        spelled = speller.push(token_id)
        shown.append(token_string(spelled or speller.name_of_hidden(token_id)))
    return shown


def token_string(spelled: bytes) -> str:
    """A token's bytes as text. A token that is not whole characters is written as bytes:\\xe2\\x80, as OpenAI writes it."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
