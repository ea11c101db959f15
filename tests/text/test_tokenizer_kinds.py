"""Tokenizers inside GGUF files by kind: WordPiece, Unigram and SentencePiece BPE against transformers; added tokens; errors."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from support.gguf_files import write_tokenizer
from test_gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER, vocabulary
from test_tokenizer import TEXTS, assert_same_ids, random_texts
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer
from transformers.convert_slow_tokenizer import SpmConverter

from distmk.errors import ModelError, UsageError
from distmk.text.gguf_tokenizer import tokenizer_from_gguf
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.tokenizer import Tokenizer
from distmk.weights.gguf_header import read_header

SPECIAL = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    "the",
    "cat",
    "The",
    "cats'",
    "theatre",
    "naïve",
    "Ünï",
    "漢字",
    "かな",
    "한국어",
    "12",
    "1234",
    "don't",
    "say",
    "a",
    "b",
]
WORDS += ["x\ny", ",", ".", "(", ")", "--", "ﬁne", "Ａ\tＢ", "é", "e\u0301", "②", "🙂"]


def load(path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(read_header(path)))


def some_texts(seed: int) -> list[str]:
    """Words, most of them known, and random characters, among runs of spaces."""
    rng = random.Random(seed)
    made = ["".join(rng.choice(WORDS) + " " * rng.randrange(3) for _ in range(rng.randrange(12))) for _ in range(200)]
    return [text for text in [*TEXTS, *made, *random_texts(200, seed)] if "<" not in text]


def assert_streams(mine: Tokenizer, texts: Sequence[str], want: Callable[[list[int]], str]) -> None:
    for text in texts:
        ids = mine.encode(text)
        stream = StreamDecoder(mine)
        streamed = "".join([stream.push(token_id) for token_id in ids] + [stream.flush()])
        assert mine.decode(ids) == want(ids) == streamed, text


@pytest.mark.parametrize("options", [{}, {"lowercase": False}, {"lowercase": True, "strip_accents": False}])
def test_wordpiece_is_that_of_transformers(tmp_path: Path, options: Mapping[str, bool]) -> None:
    seed = random.randrange(1 << 30)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    lowercase = options.get("lowercase", True)
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=options.get("strip_accents"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    inner.train_from_iterator(some_texts(seed), trainer)
    vocab = inner.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    spelled = [t if t in special else t.removeprefix("##") if t.startswith("##") else "▁" + t for t in tokens]
    settings = {f"normalizer__{name}": value for name, value in options.items()}
    settings |= {"token_type": [CONTROL] * 5 + [NORMAL] * (len(tokens) - 5)}
    settings |= {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    mine = load(write_tokenizer(tmp_path / "m.gguf", "bert", spelled, "bert", **settings))
    hf = BertTokenizer(vocab=vocab, do_lower_case=lowercase, strip_accents=options.get("strip_accents"))
    texts = [*some_texts(seed + 1), "a [MASK] b[SEP]c [UNK]", "x" * 101]
    assert_same_ids(mine, hf.encode, texts, f"seed {seed}")
    assert_streams(mine, texts, lambda ids: hf.backend_tokenizer.decode(ids, skip_special_tokens=True))
    bare = load(
        write_tokenizer(
            tmp_path / "b.gguf", "bert", spelled, "bert", **settings, add_bos_token=False, add_sep_token=False
        )
    )
    assert bare.encode("the cat") == mine.encode("the cat")[1:-1]


def compiled_charsmap(mapping: Mapping[str, str]) -> list[int]:
    """SentencePiece's precompiled_charsmap: the bytes of a Darts double array, and the replacements, each with a zero byte.

    A node's children are at its index ^ its offset ^ their byte; here every node has 256 units for them of its own.
    """
    tree: dict[Any, Any] = {}
    replacements = b""
    for source, target in mapping.items():
        node = tree
        for byte in source.encode():
            node = node.setdefault(byte, {})
        node["value"] = len(replacements)
        replacements += target.encode() + b"\0"
    units = [0] * 256
    todo = [(0, tree, 0)]  # index, children, label
    while todo:
        index, node, label = todo.pop()
        base = len(units)
        units += [0] * 256
        units[index] = (base ^ index) << 10 | ("value" in node) << 8 | label
        if "value" in node:
            units[base] = 1 << 31 | node.pop("value")
        todo += [(base ^ byte, child, byte) for byte, child in node.items()]
    return list(struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + replacements)


CHARSMAP = {"\t": " ", "\n": " ", "ﬁ": "fi", "Ａ": "A", "Ｂ": "B", "②": "2", "\u3000": " "}


def unigram_pieces(seed: int) -> list[tuple[str, float]]:
    """A trained vocabulary: control, unknown and byte tokens first."""
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    trainer.vocab_size += len(SPECIAL)
    inner.train_from_iterator(some_texts(seed), trainer)
    return [(piece, score) for piece, score in json.loads(inner.to_str())["model"]["vocab"]]


def bpe_pieces(seed: int) -> list[tuple[str, float]]:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(some_texts(seed), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = inner.get_vocab()
    found = sorted(vocab, key=lambda token: vocab[token])
    return [(token, 0.0) for token in SPECIAL] + [(token, -float(rank)) for rank, token in enumerate(found)]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("remove_extra", [True, False])
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_sentencepiece_is_that_of_transformers(tmp_path: Path, kind: str, remove_extra: bool, prefix: bool) -> None:
    """Unigram and BPE, by transformers' reading of SentencePiece's own files."""
    seed = random.randrange(1 << 30)
    pieces = unigram_pieces(seed) if kind == "t5" else bpe_pieces(seed)
    tokens, scores = [token for token, _ in pieces], [score for _, score in pieces]
    types = [CONTROL, CONTROL, UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(pieces) - len(SPECIAL))
    charsmap = compiled_charsmap(CHARSMAP) if kind == "t5" else []
    settings = {"precompiled_charsmap": charsmap} if charsmap else {}
    mine = load(
        write_tokenizer(
            *(tmp_path / "m.gguf", kind, tokens),
            **settings, scores=scores, token_type=types, unknown_token_id=2,
            remove_extra_whitespaces=remove_extra, add_space_prefix=prefix, add_bos_token=False, add_eos_token=False,
        )
    )  # fmt: skip
    spec = SimpleNamespace(
        precompiled_charsmap=bytes(charsmap), remove_extra_whitespaces=remove_extra, escape_whitespaces=True,
        add_dummy_prefix=prefix,
    )  # fmt: skip
    proto = SimpleNamespace(
        trainer_spec=SimpleNamespace(byte_fallback=True, unk_piece="<unk>", unk_id=2),
        normalizer_spec=spec,
        pieces=[SimpleNamespace(piece=t, score=s, type=k) for (t, s), k in zip(pieces, types, strict=True)],
    )
    vocab = pieces if kind == "t5" else {token: token_id for token_id, token in enumerate(tokens)}
    hf = SpmConverter.build_tokenizer_from_spm_proto(proto, vocab)
    texts = some_texts(seed + 1)
    assert_same_ids(mine, lambda text: hf.encode(text).ids, texts, f"seed {seed}")
    assert_streams(mine, texts, hf.decode)
    if charsmap:
        for text in texts:
            assert "\u0301" in text or mine.encode(text) == mine.encode(text.translate(str.maketrans(CHARSMAP))), text


def viterbi(pieces: Mapping[str, tuple[int, float]], text: str, unknown: tuple[int, float]) -> list[int]:
    """`llm_tokenizer_ugm_session` of llama.cpp: the best sum of scores, the longest last token of equal ones. An unknown
    character has a score of its own, and neighbours are one token.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        found = [
            (best[at][0] + pieces[text[at:end]][1], at, pieces[text[at:end]][0])
            for at in range(end)
            if text[at:end] in pieces
        ]
        if text[end - 1] not in pieces:
            found.append((best[end - 1][0] + unknown[1], end - 1, unknown[0]))
        score, at, token_id = max(found, key=lambda cut: (cut[0], -cut[1]))
        before = best[at][1]
        best.append((score, before if before[-1:] == [token_id] == [unknown[0]] else [*before, token_id]))
    return best[-1][1]


def test_unigram_finds_the_best_cut(tmp_path: Path) -> None:
    """Scores of tokens that are not normal, such as the -1000 that converters give to added ones, do not count."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    words = sorted({"".join(rng.choice("▁abcd") for _ in range(rng.randrange(1, 5))) for _ in range(90)} | set("▁abc"))
    words = [word for word in words if word != "d"]  # which is unknown, but in words
    scores = [-rng.randrange(64, 640) / 64 for _ in words]  # whose sums are exact
    tokens = ["<pad>", "</s>", "<unk>", *words, "<own>"]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(words), USER]
    settings = {"scores": [0.0, 0.0, 0.0, *scores, -1000.0], "token_type": types, "add_space_prefix": True}
    mine = load(write_tokenizer(tmp_path / "m.gguf", "t5", tokens, **settings))
    pieces = {word: (3 + at, score) for at, (word, score) in enumerate(zip(words, scores, strict=True))}
    for text in ("".join(rng.choice("abcdde ") for _ in range(rng.randrange(1, 30))) for _ in range(300)):
        want = viterbi(pieces, "▁" + text.replace(" ", "▁"), (2, min(scores) - 10))
        assert mine.encode(text) == [*want, 1], f"seed {seed}: {text!r}"
    assert mine.encode("<own>a</s>")[0] == len(tokens) - 1
    few = ["<pad>", "</s>", "<unk>", "a", "b", "c", "abc", "da", "<own>"]
    settings = {
        "scores": [0.0, 0.0, 0.0, -10.0, -10.0, -10.0, -1.0, -9.0, -1000.0],
        "token_type": [3, 3, 2, 1, 1, 1, 1, 1, 4],
    }
    assert load(write_tokenizer(tmp_path / "f.gguf", "t5", few, **settings)).encode("dabc") == [2, 6, 1]  # -21, not -29


def test_gemma_has_no_prefix_and_whole_spaces(tmp_path: Path) -> None:
    """Files have runs of spaces as user-defined tokens with real spaces; in tokenizer.json they are the result of merges."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    tokens, scores, types = vocabulary()
    runs, at = ["  ", "   ", "\n", "\n\n"], tokens.index("▁t")
    tokens = [*tokens[:at], *runs, *(t for t in tokens[at:] if t.strip("▁") or len(t) == 1)]
    scores = [0.0] * 259 + [-1000.0] * len(runs) + [-float(i) for i in range(len(tokens) - 259 - len(runs))]
    types = (
        [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [USER] * len(runs)
        + [NORMAL] * (len(tokens) - 260 - len(runs))
        + [USER]
    )
    settings = {"scores": scores, "token_type": types, "add_space_prefix": False, "bos_token_id": 1, "eos_token_id": 2}
    path = write_tokenizer(tmp_path / "m.gguf", "llama", tokens, "gemma3", **settings, unknown_token_id=0)
    hf, _ = mapping.convert_gguf_tokenizer(*mapping.get_gguf_tokenizer(str(path))[:2])
    mine, seed = load(path), random.randrange(1 << 30)
    texts = [text for text in [*some_texts(seed), "a  b", "   the", "\n\n\n the"] if " " * 4 not in text]
    assert_same_ids(mine, lambda text: [1, *hf.encode(text, add_special_tokens=False).ids], texts, f"seed {seed}")
    for text in texts:
        assert mine.decode(mine.encode(text)) == text


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_added_tokens_of_phi3_take_the_spaces_behind_them(tmp_path: Path, arch: str) -> None:
    """`rstrip` of its tokenizer.json, which GGUF files do not have."""
    tokens, scores, types = vocabulary()
    tokens, scores, types = [*tokens, "<|user|>", "<|end|>"], [*scores, 0.0, 0.0], [*types, CONTROL, USER]
    mine = load(write_tokenizer(tmp_path / "m.gguf", "llama", tokens, arch, scores=scores, token_type=types))
    ids = mine.encode("<|user|>\nthe cat<|end|>\n <s>the")
    assert (ids == mine.encode("<|user|>the cat<|end|><s>the")) == (arch == "phi3")
    assert mine.encode("a<s> b") != mine.encode("a<s>b")


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("none", {}, UsageError, "has no tokenizer"),
        ("rwkv", {}, UsageError, "kind 'rwkv' is not supported, only 'gpt2' (byte-level BPE), 'llama' (Sent"),
        (
            "gpt2",
            {"pre": "kimi-k2"},
            UsageError,
            "pre-tokenizer 'kimi-k2' is not supported, so text would be split into other",
        ),
        ("t5", {"scores": [0.0]}, ModelError, "it has 3 tokens and 1 scores"),
        ("t5", {"scores": [0.0] * 3, "unknown_token_id": 3}, ModelError, "it has no unknown token"),
        ("t5", {"scores": [0.0] * 3, "precompiled_charsmap": [255] * 9}, ModelError, "precompiled_charsmap"),
        ("t5", {"scores": [0.0] * 3, "precompiled_charsmap": [1]}, ModelError, "precompiled_charsmap"),
        ("bert", {}, ModelError, "it has no unknown token"),
        ("bert", {"unknown_token_id": 0}, ModelError, "BOS token 101 is outside the vocabulary of 3"),
    ],
)
def test_errors(tmp_path: Path, model: str, settings: Any, error: type[UsageError], message: str) -> None:
    path = write_tokenizer(tmp_path / "m.gguf", model, ["a", "b", "c"], **settings)
    with pytest.raises(error) as e:
        load(path)
    assert message in str(e.value) and "\n" not in str(e.value)
    assert type(e.value) is error
