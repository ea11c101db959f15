"""Text to token ids and back, with the `tokenizers` library only (without transformers and torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmk.errors import ModelError, UsageError, one_line
from distmk.serving.panics import panics_as
from distmk.user_files import exists, is_folder, read_whole
from distmk.weights.checkpoint import Checkpoint
from distmk.weights.gguf_header import GgufHeader, read_header, read_numbers, read_strings
from distmk.weights.gguf_stop_tokens import stop_tokens_by_text
from distmk.weights.hf_config import MAX_TOKENIZER_BYTES

if TYPE_CHECKING:
    import tokenizers

_HINT = "give token ids with --prompt-ids instead of text"

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_SPLIT,),
    "default": (GPT2_SPLIT,),
    "smollm": (r"\p{N}", GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
"""By `tokenizer.ggml.pre`: the expressions that split text into words, applied one after the other.

As in the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2 / Qwen3, and in `llama_vocab` of llama.cpp.
"""

_CONTROL, _USER_DEFINED = 3, 4
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
        with panics_as(lambda panic: UsageError(f"the tokenizer cannot encode the prompt ({panic}); {_HINT}")):
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


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of `checkpoint`: a tokenizer.json, or the metadata of a GGUF file.

    UsageError: there is none, or its kind is not supported. ModelError: it is damaged.
    """
    path = checkpoint.path
    if path is None:
        raise UsageError(f"this model comes without a tokenizer; {_HINT}")
    if path.suffix.lower() == ".gguf":
        return Tokenizer(_from_gguf(read_header(path)))
    file = (path if is_folder(path) else path.parent) / "tokenizer.json"
    if not exists(file):
        raise UsageError(f"{file.parent}: has no tokenizer.json, so text cannot be read; {_HINT}")
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


def _from_gguf(header: GgufHeader) -> tokenizers.Tokenizer:
    """Byte-level BPE from GGUF metadata (keys: ggml's `docs/gguf.md`, section "Tokenizer")."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers

    where, meta = header.path, header.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind is None:
        raise UsageError(f"{where}: has no tokenizer; {_HINT}")
    if kind != "gpt2":
        raise UsageError(f"{where}: tokenizer kind {kind!r} is not supported, only 'gpt2' (byte-level BPE); {_HINT}")
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise UsageError(f"{where}: pre-tokenizer {pre!r} is not supported, only {', '.join(SPLITS)}; {_HINT}")
    tokens = read_strings(header, "tokenizer.ggml.tokens")
    pairs = [merge.partition(" ") for merge in read_strings(header, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    types = read_numbers(header, "tokenizer.ggml.token_type")
    if not tokens or (types and len(types) != len(tokens)) or any(" " in right or not right for _, right in merges):
        raise ModelError(f"{where}: the tokenizer is damaged: tokens, token types or merges do not go together")
    # In Llama 3, a word that is a token is encoded as it, even if no merges lead there.
    whole_words: dict[str, Any] = {"ignore_merges": True} if pre == "llama-bpe" else {}
    vocab = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **whole_words))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{where}: the tokenizer is damaged ({one_line(e)})") from None
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = _pre_tokenizer(str(pre))
    inner.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=False))
    special = dict.fromkeys([*(t for t, n in typed if n == _CONTROL), *stop_tokens_by_text(header)])
    inner.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    inner.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, n in typed if n == _USER_DEFINED and t not in special]
    )
    _add_template(inner, tokens, header)
    return inner


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_template(inner: tokenizers.Tokenizer, tokens: Sequence[str], header: GgufHeader) -> None:
    """BOS in front of a prompt and EOS behind it, if the file says so; BOS for Llama 3 unless it says otherwise (llama.cpp)."""
    from tokenizers import processors

    added = {}
    for name, default in (("bos", header.metadata.get("tokenizer.ggml.pre") == "llama-bpe"), ("eos", False)):
        token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if header.metadata.get(f"tokenizer.ggml.add_{name}_token", default) and isinstance(token_id, int):
            if not 0 <= token_id < len(tokens):
                raise ModelError(
                    f"{header.path}: {name.upper()} token {token_id} is outside the vocabulary of {len(tokens)}"
                )
            added[name] = token_id
    if added:
        single = " ".join(part for part in ("bos", "$A", "eos") if part == "$A" or part in added)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(added.items()))
