"""The bytes of tokens against the `tokenizers` library: joined they are its text of all, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.byte_fallback import byte_fallback
from support.gguf_files import write_tokenizer
from test_tokenizer import TEXTS, write_model
from test_tokenizer_kinds import CONTROL, NORMAL, bpe_pieces, some_texts, unigram_pieces
from test_tokenizer_text import WORDS, byte_level
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from distmk.text.gguf_tokenizer import tokenizer_from_gguf
from distmk.text.gguf_vocabulary import BYTE, UNKNOWN
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.token_speller import TokenSpeller, spell_all, token_string
from distmk.text.tokenizer import Tokenizer
from distmk.weights.gguf_header import read_header

SPECIAL = ["<s>", "<unk>", "<|im_end|>"]


def trained(inner: LibraryTokenizer, trainer: trainers.Trainer, seed: int) -> LibraryTokenizer:
    inner.train_from_iterator(some_texts(seed), trainer)
    return inner


def unigram(seed: int) -> LibraryTokenizer:
    """As T5's tokenizer.json, whose decoder is Metaspace."""
    inner = LibraryTokenizer(models.Unigram())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    options = {"vocab_size": 180, "special_tokens": SPECIAL, "unk_token": "<unk>", "show_progress": False}
    return trained(inner, trainers.UnigramTrainer(**options), seed)


def wordpiece(seed: int) -> LibraryTokenizer:
    inner = LibraryTokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    options = {"vocab_size": 300, "special_tokens": SPECIAL, "show_progress": False}
    trained(inner, trainers.WordPieceTrainer(**options), seed)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return inner


def bpe_with_suffix(seed: int) -> LibraryTokenizer:
    """As GPT's and CLIP's: a word's last token ends with </w>, which is a space before another one."""
    inner = LibraryTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    options = {"vocab_size": 300, "special_tokens": SPECIAL, "end_of_word_suffix": "</w>", "show_progress": False}
    return trained(inner, trainers.BpeTrainer(**options), seed)


def without_decoder(seed: int) -> LibraryTokenizer:
    inner = bpe_with_suffix(seed)
    inner.decoder = None
    return inner


def with_prefix_space(seed: int) -> LibraryTokenizer:
    inner = byte_level(seed)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


JSON_KINDS: dict[str, Callable[[int], LibraryTokenizer]] = {
    "byte fallback": lambda seed: byte_fallback(WORDS),
    "byte level": byte_level,
    "byte level with a space in front": with_prefix_space,
    "Unigram": unigram,
    "WordPiece": wordpiece,
    "BPE with a suffix": bpe_with_suffix,
    "no decoder": without_decoder,
}


def from_gguf(folder: Path, kind: str, seed: int) -> LibraryTokenizer:
    path = folder / "m.gguf"
    if kind == "gpt2":
        write_model(path, "qwen2")
    elif kind == "bert":
        words = sorted({word for text in some_texts(seed) for word in text.lower().split() if word.isalpha()})
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"▁{word}" for word in words), *"abcdehinst", ",", "▁."]
        types = [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4)
        ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
        write_tokenizer(path, "bert", tokens, "bert", token_type=types, add_bos_token=False, add_sep_token=False, **ids)
    else:
        pieces = unigram_pieces(seed) if kind == "t5" else bpe_pieces(seed)
        tokens, scores = [token for token, _ in pieces], [score for _, score in pieces]
        types = [CONTROL, CONTROL, UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
        settings = {"scores": scores, "token_type": types, "unknown_token_id": 2, "add_space_prefix": True}
        write_tokenizer(path, kind, tokens, **settings, add_bos_token=False, add_eos_token=False)
    return tokenizer_from_gguf(read_header(path))


BYTE_LEVEL_KINDS = ("byte level", "byte level with a space in front", "gguf gpt2")
KINDS = [*JSON_KINDS, "gguf gpt2", "gguf llama", "gguf t5", "gguf bert"]


def make(kind: str, folder: Path) -> tuple[LibraryTokenizer, int]:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    inner = from_gguf(folder, kind.removeprefix("gguf "), seed) if kind.startswith("gguf") else JSON_KINDS[kind](seed)
    return inner, seed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_joined_bytes_are_the_text(tmp_path: Path, kind: str, skip_special: bool) -> None:
    """Of encoded texts, and of random tokens, also behind a prompt; and so is what streams."""
    inner, seed = make(kind, tmp_path)
    mine, rng, num_tokens = Tokenizer(inner), random.Random(seed), inner.get_vocab_size()
    sequences = [inner.encode(text).ids for text in [*TEXTS, *some_texts(seed + 1)]]
    sequences += [[rng.randrange(num_tokens) for _ in range(rng.randrange(1, 9))] for _ in range(300)]
    num_exact = 0
    for ids in sequences:
        whole = inner.decode(ids, skip_special_tokens=skip_special)
        spelled = spell_all(mine, ids, skip_special)
        stream = StreamDecoder(mine, skip_special)
        streamed = "".join([stream.push(token_id) for token_id in ids]) + stream.flush()
        assert streamed == b"".join(spelled).decode(errors="replace"), ids
        if "\ufffd" in whole and kind not in BYTE_LEVEL_KINDS:
            continue  # byte fallback turns right bytes to U+FFFD as well
        num_exact += 1
        assert b"".join(spelled).decode(errors="replace") == whole, (ids, spelled)
        split = rng.randrange(len(ids) + 1)
        behind = TokenSpeller(mine, skip_special, context=ids[:split])
        assert [behind.push(token_id) for token_id in ids[split:]] == spelled[split:], (ids, split)
    assert num_exact > 200


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_where_tokens_are_in_the_text(tmp_path: Path, kind: str) -> None:
    """Every whole-character token of a text that the tokenizer keeps as it is stands at its offset."""
    inner, seed = make(kind, tmp_path)
    mine, num_kept = Tokenizer(inner), 0
    for text in [*TEXTS, *some_texts(seed + 1)]:
        ids, offsets = mine.encode(text), mine.text_offsets(text)
        assert len(ids) == len(offsets) and offsets == sorted(offsets) and all(0 <= at <= len(text) for at in offsets)
        num_added = int(bool(ids) and mine.is_special(ids[0]) and not text.startswith("<"))
        spelled = [b""] * num_added + spell_all(mine, ids[num_added:], skip_special=False)
        if b"".join(spelled) != text.encode():
            continue
        num_kept += 1
        for begin, token in zip(offsets, spelled, strict=True):
            shown = token_string(token)
            assert shown.startswith("bytes:") or text[begin : begin + len(shown)] == shown, (text, offsets, spelled)
    assert num_kept > 5
