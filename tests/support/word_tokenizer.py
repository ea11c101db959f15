"""A byte-level tokenizer of a few words."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from distmk.text.tokenizer import BYTE_LEVEL, Tokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "dog",
    "ran",
    "into",
    "forest",
    "where",
    "birds",
    "sing",
]
EOS = "<|end|>"


def word_tokenizer() -> Tokenizer:
    """256 bytes, some words with a space in front, and an end token."""
    tokens = [*BYTE_LEVEL, *(f"Ġ{word}" for word in WORDS if len(word) > 1)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for word in tokens[len(BYTE_LEVEL) :]:
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
    inner = Inner(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(EOS, special=True)])
    return Tokenizer(inner)
