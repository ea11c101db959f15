"""The vocabulary of a tokenizer as llguidance takes it: the bytes of every token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from distmk.errors import UsageError
from distmk.text.tokenizer import Tokenizer

_UNKNOWN_BYTES = (
    "this model's tokenizer does not say which bytes a token adds to a text, so answers cannot be held to a grammar"
)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each token adds behind other tokens; b"" where there is no such token. A special token has its name.

    UsageError: they depend on what stands before.
    """
    first = next((token for token in range(vocab_size) if _is_text(tokenizer, token)), None)
    if first is None or not (tokenizer.only_first_differs or tokenizer.spells_bytes(first)):
        raise UsageError(_UNKNOWN_BYTES)
    spelled = list(map(tokenizer.token_bytes, range(vocab_size)))
    decoded = [token for token in range(vocab_size) if spelled[token] and not _is_spelled(tokenizer, token)]
    for token, text in zip(decoded, tokenizer.texts_behind(first, decoded), strict=True):
        spelled[token] = text.encode()
    return spelled


def _is_spelled(tokenizer: Tokenizer, token: int) -> bool:
    """Whether the decoder takes a token's own bytes as they are."""
    return tokenizer.is_special(token) or tokenizer.spells_bytes(token)


def _is_text(tokenizer: Tokenizer, token: int) -> bool:
    return not tokenizer.is_special(token) and tokenizer.token_bytes(token).isalpha()


class TokenTable:
    """llguidance's `TokenizerWrapper`. Special tokens, and those that end an answer, are never part of its text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.tokens: Sequence[bytes] = token_bytes(tokenizer, vocab_size)
        self.eos_token_id = min(eos_ids)
        special = {token for token in range(vocab_size) if tokenizer.is_special(token)}
        self.special_token_ids = sorted(special | set(eos_ids))

    def __call__(self, text: Any) -> list[int]:
        """llguidance asks for the tokens of a text only where a grammar forces it, which `OPTIONS` of `lark` turns off."""
        raise NotImplementedError
