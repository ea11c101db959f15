"""Grammars compiled for one tokenizer, and the state of an answer in its grammar."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distmk.errors import UsageError
from distmk.text.grammar.check import check_grammar, matcher_limits, reason
from distmk.text.grammar.token_table import TokenTable
from distmk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 64  # compiled grammars


class GrammarConstraint:
    """Where an answer is in its grammar; a `TokenConstraint`.

    Tokens that continue the text are allowed, in any division of the text, and the model's end tokens where the grammar is
    complete. Where nothing can follow they alone are allowed.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, words: npt.NDArray[np.uint32]) -> None:
        """As of `TokenConstraint`. UsageError: the grammar takes too much time or memory at this place."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """As of `TokenConstraint`. UsageError: the grammar does not allow the token."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def copy(self) -> GrammarConstraint:
        """Another one at the same place."""
        return GrammarConstraint(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"structured_outputs cannot be followed any further: {reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones. Threads may share it.

    vocab_size: the model's, which may be more than the tokenizer's. eos_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: str) -> GrammarConstraint:
        """The beginning of an answer in the grammar `source`, a text in Lark.

        UsageError: it is no grammar, or takes too much time or memory, or this tokenizer cannot follow one.
        """
        with self._lock:
            kept = self._kept.get(source)
            if kept is not None:
                self._kept.move_to_end(source)
                return GrammarConstraint(kept.deep_copy())
        matcher = self._compile(source)
        with self._lock:
            self._kept[source] = matcher
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy())

    def _compile(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        check_grammar(source)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=matcher_limits())
        if matcher.is_error():
            raise UsageError(f"structured_outputs cannot be compiled: {reason(matcher.get_error())}")
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_ids:
            raise UsageError("structured_outputs needs a model with an end token, and this one has none")
        table = TokenTable(self._tokenizer, self._vocab_size, self._eos_ids)
        return LLTokenizer(table, eos_token=self._eos_ids)  # type: ignore[arg-type]
