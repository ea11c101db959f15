"""Text to token ids and back, with the `tokenizers` library only (without transformers and torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmk.errors import ModelError, UsageError, one_line
from distmk.weights.checkpoint import Checkpoint
from distmk.weights.gguf_header import GgufHeader, read_header, read_numbers, read_strings

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


class Tokenizer:
    """Encodes and decodes for one model."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the model adds to a prompt (such as BOS).

        Special tokens spelled out in the text are encoded as such. UsageError: `text` is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise UsageError(f"the prompt is not valid Unicode at character {e.start}; pass UTF-8 text") from None
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens if `skip_special`. Invalid UTF-8 becomes U+FFFD. UsageError: an id < 0."""
        try:
            text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        except OverflowError:
            raise UsageError(f"token id {min(ids)} is not a token of this model; ids are 0 or more") from None
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, which `decode` omits."""
        return token_id in self._special


class StreamDecoder:
    """Decodes ids one at a time; the pieces, joined, are what `decode` returns for all ids.

    A token cannot be decoded alone: it may have part of a character, and some tokenizers drop the space before the first
    word. `context`: ids before the first one pushed (the end of the prompt); their text is not returned, but because of them
    a first word keeps its space.
    """

    _MAX_HELD = 16
    """Tokens held back at most. A character has at most four bytes: if more tokens do not complete it, it is not UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # The tokens of the last returned piece, then those held back. The former are whole characters, and stay because the
        # text of the latter may depend on them.
        self._window: list[int] = []
        self._held_from = 0  # index in the window
        self._num_returned = 0  # characters of the window's text that were returned
        for token_id in context[-2 * self._MAX_HELD :]:
            self.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; "" while a character is incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, self._skip_special)
        full = len(self._window) - self._held_from >= self._MAX_HELD
        # An incomplete character decodes to U+FFFD, as does a real U+FFFD: that waits for the next token.
        if not full and (text.endswith("\ufffd") or len(text) <= self._num_returned):
            return ""
        return self._new_piece(text)

    def flush(self) -> str:
        """The text held back, with U+FFFD for an incomplete character. More ids may be pushed afterwards."""
        if len(self._window) == self._held_from:
            return ""
        return self._new_piece(self._tokenizer.decode(self._window, self._skip_special))

    def _new_piece(self, text: str) -> str:
        """The part of the window's `text` that was not returned yet."""
        piece = text[self._num_returned :]
        self._window = self._window[self._held_from :]
        self._held_from = len(self._window)
        self._num_returned = len(self._tokenizer.decode(self._window, self._skip_special))
        return piece


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of `checkpoint`: a tokenizer.json, or the metadata of a GGUF file.

    UsageError: there is none, or its kind is not supported. ModelError: it is damaged.
    """
    path = checkpoint.path
    if path is None:
        raise UsageError(f"this model comes without a tokenizer; {_HINT}")
    if path.suffix.lower() == ".gguf":
        return Tokenizer(_from_gguf(read_header(path)))
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.exists():
        raise UsageError(f"{file.parent}: has no tokenizer.json, so text cannot be read; {_HINT}")
    return Tokenizer(_from_json(file))


def _from_json(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
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
    inner.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, n in typed if n == _CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False, special=False) for t, n in typed if n == _USER_DEFINED])
    # llama.cpp adds BOS for Llama 3 unless the file says otherwise.
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and isinstance(bos, int):
        _prepend(inner, tokens, bos, where)
    return inner


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _prepend(inner: tokenizers.Tokenizer, tokens: Sequence[str], bos: int, where: Path) -> None:
    from tokenizers import processors

    if bos >= len(tokens):
        raise ModelError(f"{where}: BOS token {bos} is outside the vocabulary of {len(tokens)}")
    inner.post_processor = processors.TemplateProcessing(single="bos $A", special_tokens=[("bos", bos)])
