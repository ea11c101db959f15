"""How much text one token can stand for: text that is too long for a context is refused before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_UNICODE_SHRINK = 4  # NFC and NFKC make one character of at most 4, and 1 byte of at most 4; ASCII gets no shorter
_SHRINKS = {"Prepend": 1, "ByteLevel": 1} | dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"), _UNICODE_SHRINK)
_KEEPS_TEXT = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts")  # pre-tokenizers
_UTF8_BYTES = bytes([*range(0xC0), *range(0xC2, 0xF5)])  # those that occur in text


@dataclass(frozen=True)
class TextPerToken:
    """The most text that one token of a tokenizer stands for.

    `max_size`: bytes (`in_bytes`) or characters of the longest token. `lost_bytes`: bytes that become no token. `max_shrink`:
    the factor by which normalizing may shorten text beyond ASCII. `drops_blanks`: special tokens take the blanks beside them.
    """

    max_size: int
    in_bytes: bool = False
    lost_bytes: bytes = b""
    max_shrink: int = 1
    drops_blanks: bool = False

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that `text`, which is valid Unicode, can have."""
        if self.drops_blanks:
            text = "".join(text.split())
        size = len(text.encode().translate(None, self.lost_bytes)) if self.in_bytes else len(text)
        return -(-size // (self.max_size * (1 if text.isascii() else self.max_shrink)))


def text_per_token(inner: tokenizers.Tokenizer, byte_level: Mapping[str, int]) -> TextPerToken | None:
    """The bound of a tokenizer; None: one token may stand for any amount of text, as [UNK] does for a word of any length.

    `byte_level`: the byte of each character of byte-level BPE.
    """
    normalizers = list(_parts(inner.normalizer, "normalizers"))
    pre_tokenizers = list(_parts(inner.pre_tokenizer, "pretokenizers"))
    if not all(part["type"] in _KEEPS_TEXT and part.get("behavior") != "Removed" for part in pre_tokenizers):
        return None
    shrink = 1
    for part in normalizers:
        if not (factor := _SHRINKS.get(part["type"], int(_keeps_length(part)))):
            return None
        shrink *= factor
    added = inner.get_added_tokens_decoder().values()
    drops_blanks = any(token.lstrip or token.rstrip for token in added)
    model, vocab = inner.model, inner.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE" or not vocab:
        return None
    if any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers)):
        lost = bytes(byte for letter, byte in byte_level.items() if letter not in vocab)
        if shrink > 1 and not set(_UTF8_BYTES).isdisjoint(lost):  # normalizing may make bytes that are lost
            return None
        sizes = (*map(len, vocab), *(len(token.content.encode()) for token in added))
        return TextPerToken(max(sizes), True, lost, shrink, drops_blanks)
    if not _spells_everything(model, vocab):
        return None
    sizes = (*map(len, vocab), *(len(token.content) for token in added))
    return TextPerToken(max(sizes), max_shrink=shrink, drops_blanks=drops_blanks)


def _parts(component: Any, list_name: str) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer; for a sequence, the settings of its members."""

    def flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if settings["type"] != "Sequence":
            yield settings
        for part in settings.get(list_name, ()):
            yield from flat(part)

    if component is not None:
        yield from flat(json.loads(component.__getstate__()))


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether it replaces a string by one that is no shorter, in characters and in bytes."""
    replaced = normalizer.get("pattern", {}).get("String") if normalizer["type"] == "Replace" else None
    if replaced is None:
        return False
    content = normalizer["content"]
    return len(content) >= len(replaced) and len(content.encode()) >= len(replaced.encode())


def _spells_everything(model: Any, vocab: Mapping[str, int]) -> bool:
    """Whether every character becomes a token: none is left out, or lost in an unknown token that stands for several."""
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in _UTF8_BYTES):
        return True
    return model.unk_token is not None and not model.fuse_unk
