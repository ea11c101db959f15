"""Random answers within a constraint: what a model without any sense could write, through the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from distmk.engine.token_constraint import TokenConstraint
from distmk.tasks.sampling import mask_words
from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import Tokenizer

_CLOSING = frozenset(b'"}])>/ \n0')


class Writer(Protocol):
    """What chooses a token among those that are allowed."""

    def choose(self, allowed: npt.NDArray[np.int64]) -> int: ...


def allowed_tokens(constraint: TokenConstraint, vocab_size: int) -> npt.NDArray[np.int64]:
    """The tokens that may come next. AssertionError: bits beyond the vocabulary are set."""
    words = np.full(mask_words(vocab_size), 0xA5A5A5A5, dtype=np.uint32)
    constraint.fill_mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), f"bits beyond the vocabulary of {vocab_size}: {np.flatnonzero(bits)[-1]}"
    return np.flatnonzero(bits[:vocab_size])


class RandomWriter:
    """Draws tokens evenly, but favours those that close something, so that answers end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int], rng: random.Random) -> None:
        self._eos_ids, self._rng = set(eos_ids), rng
        spelled = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._closes = np.array([0 < len(each) <= 3 and set(each) <= _CLOSING for each in spelled])

    def choose(self, allowed: npt.NDArray[np.int64]) -> int:
        """One of the tokens `allowed`."""
        ends = [int(token) for token in allowed if int(token) in self._eos_ids] if len(allowed) < 64 else []
        ends = ends or sorted(self._eos_ids & set(allowed.tolist()))
        if ends and (len(ends) == len(allowed) or self._rng.random() < 0.3):
            return self._rng.choice(ends)
        closing = allowed[self._closes[allowed]]
        if len(closing) and self._rng.random() < 0.4:
            return int(closing[self._rng.randrange(len(closing))])
        return int(allowed[self._rng.randrange(len(allowed))])


def write_answer(
    constraint: TokenConstraint,
    writer: Writer,
    vocab_size: int,
    eos_ids: Collection[int],
    max_tokens: int = 2000,
) -> list[int] | None:
    """The tokens of an answer without its end token; None: it has not ended after `max_tokens`."""
    written: list[int] = []
    for _ in range(max_tokens):
        allowed = allowed_tokens(constraint, vocab_size)
        assert len(allowed), f"nothing is allowed behind {written}"
        token = writer.choose(allowed)
        constraint.accept(token)
        if token in eos_ids:
            return written
        written.append(token)
    return None


def text_of(tokenizer: Tokenizer, token_ids: Iterable[int], context: Iterable[int]) -> str:
    """The text that tokens add behind `context`. UnicodeDecodeError: it is no UTF-8."""
    speller = TokenSpeller(tokenizer, skip_special=False, context=list(context))
    return b"".join(map(speller.push, token_ids)).decode()
