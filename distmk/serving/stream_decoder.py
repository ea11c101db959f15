"""Text of token ids as they are generated: every piece ends at the end of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from distmk.serving.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens before the first generated one that its text may depend on (a space in front of a word)."""

_MAX_CONTINUATION = 3  # bytes of a UTF-8 character behind its first one


class StreamDecoder:
    """Decodes ids one at a time; the pieces, joined, are what decoding the context and all ids adds to the context's text.

    A token cannot be decoded alone: it may have part of a character, and some tokenizers drop the space before the first
    word. So each piece is the difference between two decoded windows that begin at the start of a character. Bytes that are
    not UTF-8 become U+FFFD, and spoil only themselves: `tokenizers` turns every byte token of a run to U+FFFD if one is wrong.

    `context`: ids before the first one pushed (the prompt); only its end is used, and its text is not returned. If it ends
    inside a character, the ids that complete the character return it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._before: list[int] = []  # tokens of the last piece
        self._before_text = ""
        self._held: list[int] = []  # tokens behind them, whose last character is not complete
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # of all tokens: how many bytes are incomplete
        self._num_context = 0  # of the held tokens
        self._num_returned = 0  # characters of the held tokens
        for token_id in self._end_of(context):
            self.push(token_id)
        self._num_context = len(self._held)

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; "" while a character is incomplete."""
        token_bytes = self._bytes_of(token_id)
        if not token_bytes:
            return ""
        self._held.append(token_id)
        self._utf8.decode(token_bytes)
        num_complete = self._num_complete()
        return self._look_ahead() if num_complete is None else self._release(num_complete)

    def flush(self) -> str:
        """The text held back, with U+FFFD for an incomplete character. More ids may be pushed afterwards."""
        self._utf8.reset()
        return self._release(len(self._held))

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """The last tokens of `context` that have text, from the start of a character on."""
        end: list[int] = []
        for token_id in reversed(context):
            token_bytes = self._bytes_of(token_id)
            if not token_bytes:
                continue
            end.insert(0, token_id)
            inside = 0x80 <= token_bytes[0] < 0xC0
            if len(end) >= CONTEXT_TOKENS + _MAX_CONTINUATION or (len(end) >= CONTEXT_TOKENS and not inside):
                break
        return end

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none if it has no text, or is a special token that is skipped."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _num_complete(self) -> int | None:
        """How many of the held tokens end before the incomplete character at their end; all if there is none.

        None: that character begins inside a token (of byte-level BPE).
        """
        incomplete = len(self._utf8.getstate()[0])
        count = len(self._held)
        while incomplete > 0:
            count -= 1
            incomplete -= len(self._bytes_of(self._held[count]))
        return count if incomplete == 0 else None

    def _look_ahead(self) -> str:
        """The new text of the held tokens but for the incomplete character at their end; all of them stay held."""
        complete = self._joined(self._held)[: -len(self._utf8.getstate()[0])]
        if self._num_context and not _is_utf8(complete):
            return ""  # wrong bytes, of the context or behind it: the next release tells
        text = self._decode([*self._before, *self._held]).removesuffix("\ufffd")
        piece = text[len(self._before_text) + self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _release(self, count: int) -> str:
        """The text of the first `count` held tokens, which are held no longer."""
        tokens, self._held = self._held[:count], self._held[count:]
        from_context, self._num_context = min(self._num_context, count), max(0, self._num_context - count)
        num_returned, self._num_returned = self._num_returned, 0
        if from_context and not _is_utf8(self._joined(tokens)):
            begun = [*self._before, *tokens[:from_context]]
            if self._decode([*self._before, *tokens]).startswith(self._decode(begun)):
                self._set_before(begun)  # the character that the context began was not completed
                tokens, num_returned = tokens[from_context:], 0
        return self._piece(tokens)[num_returned:] if tokens else ""

    def _piece(self, tokens: list[int]) -> str:
        """What `tokens` add to the text of those before, which they replace."""
        text = self._decode([*self._before, *tokens])
        piece = text.removeprefix(self._before_text) if text.startswith(self._before_text) else self._decode(tokens)
        joined = self._joined(tokens)
        alone = joined.decode(errors="replace")
        if piece.count("\ufffd") > alone.count("\ufffd"):
            if len(tokens) > 1 and not _is_utf8(joined):  # wrong bytes among them spoil the others
                return "".join(self._piece([token]) for token in tokens)
            piece = alone  # wrong byte tokens before them spoil the byte tokens of this character
        self._set_before(tokens)
        return piece

    def _set_before(self, tokens: list[int]) -> None:
        self._before, self._before_text = tokens, self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special)

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes_of, tokens))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
