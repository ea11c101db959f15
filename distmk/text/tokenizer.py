"""Text to token ids and back, with the `tokenizers` library only (without transformers and torch)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distmk.errors import ModelError, UsageError, one_line
from distmk.text.gguf_tokenizer import tokenizer_from_gguf
from distmk.text.panics import panics_as
from distmk.text.text_length import TextPerToken, text_per_token
from distmk.text.tokenizer_kinds import HINT
from distmk.user_files import exists, is_folder, read_whole
from distmk.weights.checkpoint import ModelFiles
from distmk.weights.gguf_header import read_header
from distmk.weights.hf_config import MAX_TOKENIZER_BYTES

if TYPE_CHECKING:
    import tokenizers

_SHORT_CHARS = 2048
"""Text up to this length is encoded in less than a millisecond, in which other threads may stand still."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable Latin-1 stands for itself, other bytes for 256 and up (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()

_FIRST_DIFFERS = frozenset(
    ("Sequence", "ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Replace", "Fuse", "Strip")
)
"""Steps of decoders which tell the first token of a text from later ones, and look at no neighbours."""


@dataclass(frozen=True)
class EncodedPrompt:
    """The token ids of a prompt, and its text if it was text."""

    token_ids: list[int]
    text: str | None = None


class Tokenizer:
    """Encodes and decodes for one model."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.spelled: dict[
            tuple[bool, int], bytes
        ] = {}  # kept for `TokenSpeller`: by whether tokens come before, and token
        added = inner.get_added_tokens_decoder()
        self._special = {token_id: str(token.content) for token_id, token in added.items() if token.special}
        self._special_ids = {text: token_id for token_id, text in self._special.items()}
        decoder = b"" if inner.decoder is None else inner.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._byte_fallback = b'"ByteFallback"' in decoder
        steps = {step.decode() for step in re.findall(rb'"type":\s*"(\w+)"', decoder)}
        self.only_first_differs = bool(steps) and steps <= _FIRST_DIFFERS and b'"Regex"' not in decoder

    def encode(self, text: str, add_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`, if `add_special` with the special tokens that the model adds to a prompt (such as BOS).

        Special tokens spelled out in the text are encoded as such. A text that begins with the tokens that would be added in
        front (`<s>Hello`) gets no second ones. `max_tokens`: a context, for which text that is too long in any case is
        refused before it is encoded. UsageError: that, or `text` is not valid Unicode. Other threads run while a long text is
        encoded.
        """
        encoded, num_added = self._encode(text, add_special, max_tokens)
        ids: list[int] = encoded.ids
        return ids[num_added:] if num_added else ids

    def text_offsets(self, text: str) -> list[int]:
        """Where in `text` each token of `encode` begins, in characters.

        A token begins where the one before it ends: a space that the tokenizer counts to neither is the later one's. The tokens
        of one character all begin where it does. UsageError: as of `encode`.
        """
        encoded, num_added = self._encode(text, add_special=True)
        begins, end = [], 0
        for begin, stop in encoded.offsets[num_added:]:
            begins.append(min(begin, end) if stop > begin else end)
            end = max(end, stop)
        return begins

    def _encode(self, text: str, add_special: bool, max_tokens: int | None = None) -> tuple[tokenizers.Encoding, int]:
        """The encoding of `text`, and how many of its first tokens are to be left out. UsageError: see `encode`."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise UsageError(f"the prompt is not valid Unicode at character {e.start}; pass UTF-8 text") from None
        if max_tokens is not None:
            self._refuse_too_long(text, max_tokens)
        is_short = len(text) <= _SHORT_CHARS
        # Keeping a panic's lines back makes other threads wait for the block.
        with panics_as(lambda panic: UsageError(f"the tokenizer cannot encode the prompt ({panic}); {HINT}"), is_short):
            if is_short:
                encoded = self._inner.encode(text, add_special_tokens=add_special)
            else:  # which releases the GIL, as `encode` does not
                encoded = self._inner.encode_batch([text], add_special_tokens=add_special)[0]
        if not add_special:
            return encoded, 0
        ids = encoded.ids
        added = encoded.special_tokens_mask  # 1 for tokens of the template, 0 for special tokens in the text
        num_added = added.index(0) if 0 in added else 0
        return encoded, num_added if ids[:num_added] == ids[num_added : 2 * num_added] else 0

    def _refuse_too_long(self, text: str, max_tokens: int) -> None:
        if len(text) <= max_tokens or self._text_per_token is None:
            return
        if (least := self._text_per_token.least_tokens(text)) >= max_tokens:
            raise UsageError(
                f"a prompt of {len(text)} characters has at least {least} tokens, which leaves no room in a context of "
                f"{max_tokens}; shorten it or raise --max-model-len"
            )

    @functools.cached_property
    def _text_per_token(self) -> TextPerToken | None:
        return text_per_token(self._inner, BYTE_LEVEL)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens if `skip_special`. Invalid UTF-8 becomes U+FFFD. UsageError: an id < 0."""
        try:
            with panics_as(lambda panic: ModelError(f"the tokenizer cannot decode tokens ({panic})"), quiet=False):
                text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        except OverflowError:
            raise UsageError(f"token id {min(ids)} is not a token of this model; ids are 0 or more") from None
        return text

    def texts_behind(self, first: int, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of the token `first`, in all of the processor's cores."""
        with panics_as(lambda panic: ModelError(f"the tokenizer cannot decode tokens ({panic})"), quiet=False):
            texts = self._inner.decode_batch([[first, token] for token in token_ids], skip_special_tokens=False)
        before = self.decode([first], skip_special=False)
        return [text.removeprefix(before) for text in texts]

    def spells_bytes(self, token_id: int) -> bool:
        """Whether a token adds its `token_bytes` to any text. Tokens of byte-level BPE do, and byte fallback's own tokens."""
        return self._byte_level or (self._byte_fallback and self._byte_of(token_id) is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character, as the tokenizer's decoder takes them.

        Byte-level BPE spells bytes as characters of `BYTE_LEVEL`, byte fallback has tokens such as <0x0A>. b"": no such token.
        """
        token = self._inner.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_fallback and (byte := self._byte_of(token_id)) is not None:
            return bytes([byte])
        if self._byte_level and all(letter in BYTE_LEVEL for letter in token):
            return bytes(BYTE_LEVEL[letter] for letter in token)
        return token.encode()

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary has a token of this id."""
        return 0 <= token_id < 1 << 32 and self._inner.id_to_token(token_id) is not None

    def special_id(self, text: str) -> int | None:
        """The special token that is spelled `text`; None: there is none."""
        return self._special_ids.get(text)

    def _byte_of(self, token_id: int) -> int | None:
        """The byte of a token such as <0x0A>; None of any other."""
        token = self._inner.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        match = None if token is None else _BYTE_TOKEN.fullmatch(token)
        return None if match is None else int(match[1], 16)

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
