"""The tokenizer in the metadata of a GGUF file (keys: ggml's `docs/gguf.md`, section "Tokenizer")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distmk.errors import ModelError, UsageError, one_line
from distmk.weights.gguf_header import GgufHeader, read_numbers, read_strings
from distmk.weights.gguf_stop_tokens import stop_tokens_by_text

if TYPE_CHECKING:
    import tokenizers

HINT = "give token ids with --prompt-ids instead of text"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """How byte-level BPE splits text into words: by `patterns`, applied one after the other.

    whole_words: a word that is a token is encoded as it, even if no merges lead there. bos: a prompt begins with BOS unless the
    file says otherwise. nfc: text is brought into Unicode's NFC first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_PLAIN, _DIGITS = Split((_GPT2,)), Split((r"\p{N}", _GPT2))
_ONE_DIGIT = Split((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),))

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "default", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert"), _PLAIN),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b", "mellum2"), _DIGITS),
    "exaone": _DIGITS,
    "llama-bpe": (llama3 := Split((_LLAMA3,), whole_words=True, bos=True)),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((_LLAMA3,))),
    "qwen2": Split(_ONE_DIGIT.patterns, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _ONE_DIGIT),
    **dict.fromkeys(("grok-2", "solar-open"), _ONE_DIGIT),
    "tekken": Split((_TEKKEN,), whole_words=True, bos=True),
}
"""By `tokenizer.ggml.pre`. Names are together that `llama_vocab` of llama.cpp treats alike; the expressions are those of the
tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen2 / Qwen3 and Mistral NeMo.
"""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # of SentencePiece, which spells a space so


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens and, by token, its type; types may be absent."""

    header: GgufHeader
    tokens: Sequence[str]
    types: Sequence[Any]

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=False) if kind in types]

    def ids(self) -> dict[str, int]:
        """The first id of every token."""
        return {token: token_id for token_id, token in reversed(list(enumerate(self.tokens)))}

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.header.path}: the tokenizer is damaged: {why}")


def tokenizer_from_gguf(header: GgufHeader) -> tokenizers.Tokenizer:
    """Byte-level BPE ("gpt2") or SentencePiece BPE ("llama"). UsageError: none, or another kind. ModelError: it is damaged."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise UsageError(f"{header.path}: has no tokenizer; {HINT}")
    if not isinstance(kind, str) or kind not in _KINDS:
        supported = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are"
        raise UsageError(f"{header.path}: tokenizer kind {kind!r} is not supported; {supported}; {HINT}")
    tokens = read_strings(header, "tokenizer.ggml.tokens")
    vocabulary = _Vocabulary(header, tokens, read_numbers(header, "tokenizer.ggml.token_type"))
    if not tokens or len(vocabulary.types) not in (0, len(tokens)):
        raise vocabulary.damaged(f"it has {len(tokens)} tokens and {len(vocabulary.types)} token types")
    inner: tokenizers.Tokenizer
    inner, bos = _KINDS[kind](vocabulary)
    _add_special(inner, vocabulary)
    _add_template(inner, vocabulary, bos)
    return inner


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether prompts begin with BOS by default."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    header = vocabulary.header
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise UsageError(f"{header.path}: pre-tokenizer {pre!r} is not supported, only {', '.join(SPLITS)}; {HINT}")
    split = SPLITS[str(pre)]
    pairs = [merge.partition(" ") for merge in read_strings(header, "tokenizer.ggml.merges")]
    if any(" " in right or not right for _, _, right in pairs):
        raise vocabulary.damaged("a merge is not two tokens")
    # The option must be left out, not off: `tokenizers` 0.20 has none of that name.
    options: dict[str, Any] = {"ignore_merges": True} if split.whole_words else {}
    inner = _bpe(vocabulary, [(left, right) for left, _, right in pairs], options)
    if split.nfc:
        inner.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner, split.bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE, and whether prompts begin with BOS by default. What is no token is spelled in tokens for bytes.

    A file has scores instead of merges: the pair that becomes the token with the highest score is merged first. transformers
    makes merges of scores in the same way (`SentencePieceExtractor`).
    """
    from tokenizers import decoders, normalizers

    header = vocabulary.header
    scores = read_numbers(header, "tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.damaged(f"it has {len(vocabulary.tokens)} tokens and {len(scores)} scores")
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if isinstance(unknown, int) and 0 <= unknown < len(vocabulary.tokens):
        options["unk_token"] = vocabulary.tokens[unknown]
    inner = _bpe(vocabulary, _merges_of(vocabulary, scores), options)
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    space = normalizers.Replace(" ", _SPACE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return inner, True


_KINDS: Mapping[str, Callable[[_Vocabulary], tuple[Any, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By `tokenizer.ggml.model`."""


def _merges_of(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every two tokens that make a third, those of the highest score first. Tokens that text cannot spell have no part in it."""
    ids = vocabulary.ids()
    for token in vocabulary.of_type(_UNKNOWN, _CONTROL, _BYTE):
        ids.pop(token, None)
    found = []
    for token, token_id in ids.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        found += [(-scores[token_id], ids[left], ids[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import models

    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=merges, **options))
    except Exception as e:  # the library raises bare Exception
        raise vocabulary.damaged(one_line(e)) from None


def _add_special(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that text spells as a whole: control tokens and those that end a reply are special, the user's own are text."""
    from tokenizers import AddedToken

    byte_level = vocabulary.header.metadata.get("tokenizer.ggml.model") == "gpt2"
    control = vocabulary.of_type(_CONTROL) if byte_level else vocabulary.of_type(_CONTROL, _UNKNOWN)
    special = dict.fromkeys([*control, *stop_tokens_by_text(vocabulary.header)])
    inner.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    own = [text for text in vocabulary.of_type(_USER_DEFINED) if text not in special]
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in own])


def _add_template(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary, bos: bool) -> None:
    """BOS in front of a prompt and EOS behind it, if the file says so; BOS by default if `bos` (llama.cpp)."""
    from tokenizers import processors

    metadata, tokens = vocabulary.header.metadata, vocabulary.tokens
    usual = {"bos": 1, "eos": 2} if metadata.get("tokenizer.ggml.model") == "llama" else {}
    added = {}
    for name, default in (("bos", bos), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and isinstance(token_id, int):
            if not 0 <= token_id < len(tokens):
                raise ModelError(
                    f"{vocabulary.header.path}: {name.upper()} token {token_id} is outside the vocabulary of {len(tokens)}"
                )
            added[name] = token_id
    if added:
        single = " ".join(part for part in ("bos", "$A", "eos") if part == "$A" or part in added)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(added.items()))
