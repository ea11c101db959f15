"""Text to token ids and back, with the `tokenizers` library only (without transformers and torch)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distmk.errors import ModelError, UsageError, one_line
from distmk.serving.gguf_kinds import HINT
from distmk.serving.gguf_tokenizer import tokenizer_from_gguf
from distmk.serving.panics import panics_as
from distmk.user_files import exists, is_folder, read_whole
from distmk.weights.checkpoint import ModelFiles
from distmk.weights.gguf_header import read_header
from distmk.weights.hf_config import MAX_TOKENIZER_BYTES

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable Latin-1 stands for itself, other bytes for 256 and up (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


class Tokenizer:
    """Encodes and decodes for one model."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._texts: dict[int, str] = {}  # of tokens alone
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = b"" if inner.decoder is None else inner.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._byte_fallback = b'"ByteFallback"' in decoder

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`, if `add_special` with the special tokens that the model adds to a prompt (such as BOS).

        Special tokens spelled out in the text are encoded as such; a text that begins with those that would be added in front
        (`<s>Hello`) gets no second ones. UsageError: `text` is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise UsageError(f"the prompt is not valid Unicode at character {e.start}; pass UTF-8 text") from None
        with panics_as(lambda panic: UsageError(f"the tokenizer cannot encode the prompt ({panic}); {HINT}")):
            encoded = self._inner.encode(text, add_special_tokens=add_special)
        ids: list[int] = encoded.ids
        if not add_special:
            return ids
        added = encoded.special_tokens_mask  # 1 for tokens of the template, 0 for special tokens in the text
        num_added = added.index(0) if 0 in added else 0
        return ids[num_added:] if ids[:num_added] == ids[num_added : 2 * num_added] else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens if `skip_special`. Invalid UTF-8 becomes U+FFFD. UsageError: an id < 0."""
        try:
            with panics_as(lambda panic: ModelError(f"the tokenizer cannot decode tokens ({panic})"), quiet=False):
                text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        except OverflowError:
            raise UsageError(f"token id {min(ids)} is not a token of this model; ids are 0 or more") from None
        return text

    def token_text(self, token_id: int) -> str:
        """A token alone, special or not; U+FFFD for a part of a character. Log probabilities ask for the same ones often."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character, as the tokenizer's decoder takes them.

        Byte-level BPE spells bytes as characters of `BYTE_LEVEL`, byte fallback has tokens such as <0x0A>. b"": no such token.
        """
        token = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._byte_level and all(letter in BYTE_LEVEL for letter in token):
            return bytes(BYTE_LEVEL[letter] for letter in token)
        return token.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, which `decode` omits."""
        return token_id in self._special


def load_tokenizer(checkpoint: ModelFiles) -> Tokenizer:
    """The tokenizer of `checkpoint`: a tokenizer.json, or the metadata of a GGUF file.

    UsageError: there is none, or its kind is not supported. ModelError: it is damaged.
    """
    path = checkpoint.path
    if path is None:
        raise UsageError(f"this model comes without a tokenizer; {HINT}")
    if path.suffix.lower() == ".gguf":
        return Tokenizer(tokenizer_from_gguf(read_header(path)))
    file = (path if is_folder(path) else path.parent) / "tokenizer.json"
    if not exists(file):
        raise UsageError(f"{file.parent}: has no tokenizer.json, so text cannot be read; {HINT}")
    return Tokenizer(_from_json(file))


def _from_json(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    data = read_whole(file, MAX_TOKENIZER_BYTES)
    try:
        with panics_as(lambda text: ModelError(f"{file}: not a valid tokenizer.json ({text})")):
            inner = tokenizers.Tokenizer.from_buffer(data)
    except ModelError:
        raise
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{file}: not a valid tokenizer.json ({one_line(e)})") from None
    # A file saved during training may ask for truncation or padding.
    inner.no_truncation()
    inner.no_padding()
    return inner
