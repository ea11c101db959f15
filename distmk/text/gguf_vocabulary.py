"""The vocabulary in the metadata of a GGUF file: tokens, their types and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmk.errors import ModelError
from distmk.weights.gguf_header import ArrayRef, GgufHeader, Scalar, read_numbers, read_strings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of `tokenizer.ggml.token_type`."""

SPACE = "▁"  # of SentencePiece, which spells a space so

CONTINUATION = "##"  # of WordPiece, in front of a token inside a word


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and, by token, its type; types may be absent."""

    header: GgufHeader
    tokens: Sequence[str]
    types: Sequence[Any]

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=False) if kind in types]

    def ids(self) -> dict[str, int]:
        """The first id of every token."""
        return {token: token_id for token_id, token in reversed(list(enumerate(self.tokens)))}

    def scores(self) -> list[float]:
        """A score for every token: a log probability, or its rank with a minus. ModelError: there are none."""
        scores = read_numbers(self.header, "tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise self.damaged(f"it has {len(self.tokens)} tokens and {len(scores)} scores")
        return [float(score) for score in scores]

    def setting(self, name: str) -> Scalar | ArrayRef | None:
        return self.header.metadata.get(f"tokenizer.ggml.{name}")

    def id_of(self, name: str, usual: int) -> int | None:
        """The id under `name`_token_id, or `usual`; None: the vocabulary has no such token."""
        token_id = self.setting(f"{name}_token_id")
        token_id = usual if token_id is None else token_id
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def needed_id_of(self, name: str, usual: int) -> int:
        """As `id_of`. ModelError: the vocabulary has no such token."""
        token_id = self.id_of(name, usual)
        if token_id is None:
            raise self.damaged(f"it has no {name} token")
        return token_id

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.header.path}: the tokenizer is damaged: {why}")


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """ModelError: it is damaged."""
    tokens = read_strings(header, "tokenizer.ggml.tokens")
    types = read_numbers(header, "tokenizer.ggml.token_type")
    vocabulary = Vocabulary(header, tokens, types)
    if not tokens or len(types) not in (0, len(tokens)):
        raise vocabulary.damaged(f"it has {len(tokens)} tokens and {len(types)} token types")
    if vocabulary.setting("model") == "bert":
        every_type = types or [NORMAL] * len(tokens)
        spelled = [_wordpiece_spelling(token, kind) for token, kind in zip(tokens, every_type, strict=True)]
        return Vocabulary(header, spelled, types)
    return vocabulary


def _wordpiece_spelling(token: str, kind: int | float | bool) -> str:
    """A token as WordPiece's vocab.txt spells it. llama.cpp's converter marks tokens that begin a word, instead of the
    others.
    """
    if kind in (CONTROL, UNKNOWN):
        return token
    return token[len(SPACE) :] if token.startswith(SPACE) else CONTINUATION + token
