"""A tokenizer of the `tokenizers` library for each kind of tokenizer that GGUF files have, without its special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distmk.errors import UsageError, one_line
from distmk.text.gguf_pretokenizers import SPLITS, Split
from distmk.text.gguf_vocabulary import BYTE, CONTINUATION, CONTROL, NORMAL, SPACE, UNKNOWN, Vocabulary
from distmk.text.panics import panics_as
from distmk.weights.gguf_header import read_numbers, read_strings
from distmk.weights.gguf_keys import KNOWN_PRE_TOKENIZERS

if TYPE_CHECKING:
    import tokenizers

HINT = "give token ids with --prompt-ids instead of text"


@dataclass(frozen=True)
class TokenizerKind:
    """A kind of tokenizer: how to build one, and the tokens that it adds to a prompt unless the file says otherwise (as in
    llama.cpp).

    added: names of the tokens that may be added, in front and behind. adds: names of the tokens that are added. usual_ids:
    their ids in files that do not name them.
    """

    title: str
    build: Callable[[Vocabulary], tokenizers.Tokenizer]
    adds: Callable[[Vocabulary], tuple[str, ...]]
    usual_ids: Mapping[str, int]
    added: tuple[str, str] = ("bos", "eos")


def _split_of(vocabulary: Vocabulary) -> Split:
    architecture = str(vocabulary.header.metadata.get("general.architecture"))
    pre = vocabulary.setting("pre") or KNOWN_PRE_TOKENIZERS.get(architecture, "gpt-2")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise UsageError(
            f"{vocabulary.header.path}: pre-tokenizer {pre!r} is not supported, so text would be split into other words than "
            f"the model learned; use the model's Hugging Face folder, or {HINT}"
        )
    return SPLITS[pre]


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Byte-level BPE."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    split = _split_of(vocabulary)
    pairs = [merge.partition(" ") for merge in read_strings(vocabulary.header, "tokenizer.ggml.merges")]
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
    return inner


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE. Tokens for bytes spell text that no other token has.

    A file has scores instead of merges. The pair that becomes the token with the highest score is merged first. transformers
    makes merges of scores in the same way (`SentencePieceExtractor`).
    """
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    if (unknown := vocabulary.id_of("unknown", usual=0)) is not None:
        options["unk_token"] = vocabulary.tokens[unknown]
    inner = _bpe(vocabulary, _merges_of(vocabulary, vocabulary.scores()), options)
    _spell_spaces(inner, vocabulary, prefix=vocabulary.setting("add_space_prefix") is not False)
    return inner


def _unigram(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece Unigram (T5): of all ways to cut a text into tokens, the one with the highest sum of scores."""
    import tokenizers
    from tokenizers import models

    scores, unknown = vocabulary.scores(), vocabulary.needed_id_of("unknown", usual=2)
    normal = [kind == NORMAL for kind in vocabulary.types] or [True] * len(scores)
    # An unknown character costs 10 more than the worst score of a normal token (llama.cpp).
    worst = min((score for score, counts in zip(scores, normal, strict=True) if counts), default=0.0)
    pieces = [(t, s if counts else worst) for t, s, counts in zip(vocabulary.tokens, scores, normal, strict=True)]
    try:
        model = models.Unigram(pieces, unk_id=unknown, byte_fallback=bool(vocabulary.of_type(BYTE)))
    except Exception as e:  # the library raises bare Exception
        raise vocabulary.damaged(one_line(e)) from None
    inner = tokenizers.Tokenizer(model)
    _spell_spaces(inner, vocabulary, prefix=vocabulary.setting("add_space_prefix") is True, steps=_charsmap(vocabulary))
    return inner


def _wordpiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """WordPiece (BERT): a word is cut into its longest tokens from the left, or is unknown."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.tokens[vocabulary.needed_id_of("unknown", usual=100)]
    model = models.WordPiece(vocab=vocabulary.ids(), unk_token=unknown, continuing_subword_prefix=CONTINUATION)
    inner = tokenizers.Tokenizer(model)
    lowercase = vocabulary.setting("normalizer.lowercase") is not False
    strip_accents = vocabulary.setting("normalizer.strip_accents")
    strip_accents = lowercase if strip_accents is None else bool(strip_accents)
    inner.normalizer = normalizers.BertNormalizer(strip_accents=strip_accents, lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return inner


KINDS: Mapping[str, TokenizerKind] = {
    "gpt2": TokenizerKind("byte-level BPE", _byte_level, lambda v: ("bos",) if _split_of(v).bos else (), {}),
    "llama": TokenizerKind("SentencePiece BPE", _sentencepiece, lambda v: ("bos",), {"bos": 1, "eos": 2}),
    "t5": TokenizerKind("SentencePiece Unigram", _unigram, lambda v: ("eos",), {"eos": 1}),
    "bert": TokenizerKind("WordPiece", _wordpiece, lambda v: ("bos", "sep"), {"bos": 101, "sep": 102}, ("bos", "sep")),
}
"""The tokenizers that GGUF files name, by `tokenizer.ggml.model`."""


def _spell_spaces(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, prefix: bool, steps: Sequence[Any] = ()) -> None:
    """Set how SentencePiece normalizes text, after `steps`, and how it decodes it. `prefix`: a space is put in front."""
    from tokenizers import Regex, decoders, normalizers

    steps = list(steps)
    if vocabulary.setting("remove_extra_whitespaces") is True:  # spaces only: other whitespace counts as text
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(SPACE))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)


def _charsmap(vocabulary: Vocabulary) -> list[Any]:
    """The normalization that SentencePiece compiled into the model, usually NFKC. ModelError: it is damaged."""
    from tokenizers import normalizers

    compiled = read_numbers(vocabulary.header, "tokenizer.ggml.precompiled_charsmap")
    if not compiled:
        return []
    with panics_as(lambda panic: vocabulary.damaged(f"precompiled_charsmap: {panic}")):
        try:
            return [normalizers.Precompiled(bytes(int(byte) & 0xFF for byte in compiled))]
        except Exception as e:  # the library raises bare Exception
            raise vocabulary.damaged(f"precompiled_charsmap: {one_line(e)}") from None


def _merges_of(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every two tokens that make a third, by falling score of the third. Tokens that text cannot spell have no part in it."""
    ids = vocabulary.ids()
    for token in vocabulary.of_type(UNKNOWN, CONTROL, BYTE):
        ids.pop(token, None)
    found = []
    for token, token_id in ids.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        found += [(-scores[token_id], ids[left], ids[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import models

    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=merges, **options))
    except Exception as e:  # the library raises bare Exception
        raise vocabulary.damaged(one_line(e)) from None
