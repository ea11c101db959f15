"""Text of token ids while they are generated: every piece ends at the end of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes ids one at a time; the pieces, joined, are what decoding the context and all ids adds to the context's text.

    Bytes that are not UTF-8 become U+FFFD, and spoil only themselves: `tokenizers` turns every byte token of a run to U+FFFD if
    one is wrong.

    `skip_special`: special tokens are no text. `context`: ids before the first one pushed (the prompt), whose text is not
    returned. If it ends inside a character, the ids that complete the character return it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        self._speller = TokenSpeller(tokenizer, skip_special, context)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._speller.tail)
        self._begun = self._utf8.getstate()[0]  # the incomplete character at the end of the context

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; "" while a character is incomplete."""
        return self._told(self._utf8.decode(self._speller.push(token_id)))

    def flush(self) -> str:
        """The text held back, with U+FFFD for an incomplete character. More ids may be pushed afterwards."""
        return self._told(self._utf8.decode(b"", final=True))

    def _told(self, text: str) -> str:
        """`text` without the U+FFFD of a character that the context began and no id completed."""
        if not text or not self._begun:
            return text
        begun, self._begun = self._begun, b""
        return text if text.encode().startswith(begun) else text[1:]
