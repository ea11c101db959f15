"""Reasoning that ends after a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from distmk.text.grammar.compiler import GrammarConstraint
from distmk.text.stream_decoder import StreamDecoder


class ReasoningReader(Protocol):
    """What knows whether the text so far ends inside the reasoning, such as a parser of answers."""

    is_reasoning: bool

    def push(self, text: str) -> object: ...


class ThinkingBudget:
    """A `TokenConstraint` that forces the end of the reasoning once it has `budget` tokens. Else all tokens are allowed, or those
    that `inner` allows.

    end_ids: the tokens of the text that ends the reasoning. It comes a few tokens later if `inner` does not allow it at once,
    as in the middle of a character.
    """

    def __init__(
        self,
        budget: int,
        end_ids: Sequence[int],
        vocab_size: int,
        make_reader: Callable[[], ReasoningReader],
        make_decoder: Callable[[], StreamDecoder],
        inner: GrammarConstraint | None = None,
    ) -> None:
        self._budget, self._end_ids, self._vocab_size = budget, list(end_ids), vocab_size
        self._make_reader, self._make_decoder = make_reader, make_decoder
        self._reader, self._decoder, self._inner = make_reader(), make_decoder(), inner
        self._tokens: list[int] = []
        self._num_reasoning = 0
        self._num_forced = 0  # tokens of the end that have come
        self._reader.push("")

    def fill_mask(self, words: npt.NDArray[np.uint32]) -> None:
        """As of `TokenConstraint`. UsageError: as of `inner`."""
        if self._inner is not None:
            self._inner.fill_mask(words)
        else:
            allow_all(words, self._vocab_size)
        forced = self._forced
        if forced is not None and words[forced // 32] >> (forced % 32) & 1:
            words[:] = 0
            words[forced // 32] = 1 << (forced % 32)

    def accept(self, token: int) -> None:
        """As of `TokenConstraint`. UsageError: as of `inner`."""
        if self._inner is not None:
            self._inner.accept(token)
        self._follow(token)

    def copy(self) -> ThinkingBudget:
        """Another one at the same place."""
        inner = None if self._inner is None else self._inner.copy()
        copied = ThinkingBudget(
            self._budget, self._end_ids, self._vocab_size, self._make_reader, self._make_decoder, inner
        )
        for token in self._tokens:
            copied._follow(token)
        return copied

    def _follow(self, token: int) -> None:
        self._tokens.append(token)
        self._num_forced = self._num_forced + 1 if token == self._forced else 0
        self._reader.push(self._decoder.push(token))
        self._num_reasoning += self._reader.is_reasoning

    @property
    def _forced(self) -> int | None:
        """The next token, where the end of the reasoning is due; None: any."""
        is_due = self._reader.is_reasoning and self._num_reasoning >= self._budget
        return self._end_ids[self._num_forced] if is_due and self._num_forced < len(self._end_ids) else None


def allow_all(words: npt.NDArray[np.uint32], vocab_size: int) -> None:
    """Set the bits of all tokens, and no others."""
    whole, rest = divmod(vocab_size, 32)
    words[:whole] = 0xFFFFFFFF
    words[whole:] = 0
    if rest:
        words[whole] = (1 << rest) - 1
