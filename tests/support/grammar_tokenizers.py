"""Tokenizers of several kinds, for tests of grammars."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from support.byte_fallback import byte_fallback
from support.word_tokenizer import EOS, word_tokenizer

from distmk.text.grammar.compiler import GrammarCompiler
from distmk.text.tokenizer import Tokenizer

_PIECES = [
    "▁",
    "▁the",
    "{",
    '{"',
    '":',
    '"',
    "}",
    "]",
    "▁true",
    "ing",
    "é",
    "1",
    "23",
    "▁漢",
    "<",
    "think",
    ">",
    "/",
    "</",
]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what a model with it has. vocab_size: more than the tokenizer's, as in padded models."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_ids)


def _byte_level() -> Vocabulary:
    """One of its end tokens is an ordinary one for the tokenizer."""
    tokenizer = word_tokenizer()
    eos = tokenizer.encode(EOS)[0]
    return Vocabulary(tokenizer, eos + 1, (eos, tokenizer.encode(" sing")[0]))


def _sentencepiece() -> Vocabulary:
    inner = byte_fallback(_PIECES)
    inner.add_special_tokens(["</s>", "<tool_call>"])
    eos = inner.token_to_id("</s>")
    return Vocabulary(Tokenizer(inner), inner.get_vocab_size() + 45, (eos, inner.token_to_id("<s>")))


VOCABULARIES: Mapping[str, Vocabulary] = {"byte level": _byte_level(), "byte fallback": _sentencepiece()}
