"""SentencePiece BPE inside GGUF files against llama.cpp's algorithm and transformers; names of pre-tokenizers that are alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_files import write_gguf
from test_tokenizer import TEXTS, assert_same_ids, load, random_texts, write_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from distmk.text.gguf_pretokenizers import SPLITS
from distmk.text.stream_decoder import StreamDecoder

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LETTERS = "▁etaoinshrdlucmfwypvbgkjqxz.,'é漢ABCDEFGHI0123456789"
WORDS = (
    *("▁t", "he", "▁the", "in", "▁a", "er", "▁▁", "▁▁▁▁", "an", "re", "on", "at", "en", "nd", "▁s", "or", "▁and"),
    *("ing", "it", "▁in", "st", "ll", "▁th", "▁w", "▁cat", "cat", "▁ca", "hello", "ell", "lo", "hel", "▁hello", "12"),
)


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as in Llama 2's tokenizer, in small: <unk>, <s>, </s>, bytes, words, letters, one own token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *LETTERS, "<think>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(WORDS) + len(LETTERS))] + [0.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(WORDS) + len(LETTERS)) + [USER]
    return tokens, scores, types


def write(path: Path, **metadata: Any) -> Path:
    tokens, scores, types = vocabulary()

    def edit(w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("llama")
        w.add_token_list(tokens)
        w.add_token_scores(scores)
        w.add_token_types(types)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        for key, value in metadata.items():
            w.add_bool(f"tokenizer.ggml.{key}", value)

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(tokens),
        head_dim=16, num_key_value_heads=1,
    )  # fmt: skip
    write_gguf(path, config, LlamaForCausalLM(config).state_dict(), edit=edit)
    return path


def llama_cpp(text: str, prefix: bool = True) -> list[int]:
    """`llm_tokenizer_spm_session` of llama.cpp's llama-vocab.cpp: of two neighbours that make a token, those of the highest
    score are joined first, the leftmost of equal ones; what is no token at the end becomes bytes.
    """
    tokens, scores, _ = vocabulary()
    ids = {token: token_id for token_id, token in enumerate(tokens)}

    def plain(part: str) -> Iterator[int]:
        symbols = list((" " * prefix + part).replace(" ", "▁"))
        while True:
            pairs = [(a + b, at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
            if not pairs:
                break
            joined, at = max(pairs, key=lambda pair: (scores[ids[pair[0]]], -pair[1]))
            symbols[at : at + 2] = [joined]
        for symbol in symbols:
            yield from [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]

    special = ("<unk>", "<s>", "</s>", "<think>")
    found, begin, at = [1], 0, 0
    while at <= len(text):
        here = next((s for s in special if text.startswith(s, at)), None)
        if here or at == len(text):
            found += plain(text[begin:at]) if at > begin else []
            found += [ids[here]] if here else []
            begin = at + len(here or "")
        at += len(here or " ")
    return found


TEXT = ["the cat and hello there", "</s>the<think> in <unk>x", "  two    spaces ", "a\nb\t", "<s>", *TEXTS]


def test_sentencepiece_is_that_of_llama_cpp(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    words = ["".join(rng.choice("thecain  dr▁s12.é") for _ in range(rng.randrange(40))) for _ in range(300)]
    texts = TEXT + words + random_texts(200, seed)
    mine = load(write(tmp_path / "m.gguf"))
    assert_same_ids(mine, lambda text: llama_cpp(text.removeprefix("<s>")), texts, f"seed {seed}")
    bare = load(write(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False))
    assert_same_ids(bare, lambda text: llama_cpp(text, prefix=False)[1:], texts, f"seed {seed}, no prefix")


def test_sentencepiece_is_that_of_transformers(tmp_path: Path) -> None:
    """But for text that begins with a space, to which transformers adds none, though SentencePiece and llama.cpp do."""
    mine = load(write(tmp_path / "m.gguf"))
    hf = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    texts = [text for text in TEXT + random_texts(200, 5) if "<" not in text and text.strip() and text[0] != " "]
    assert_same_ids(mine, hf.encode, texts, "transformers")
    for text in texts:
        ids = mine.encode(text)
        assert mine.decode(ids) == text
        stream = StreamDecoder(mine)
        assert "".join([stream.push(token_id) for token_id in ids] + [stream.flush()]) == text
    assert mine.is_special(1) and mine.is_special(2) and not mine.is_special(len(vocabulary()[0]) - 1)


@pytest.mark.parametrize(
    ("name", "same"),
    [("phi-2", "gpt-2"), ("llama3", "llama-bpe"), ("starcoder", "smollm"), ("megrez", "deepseek-r1-qwen")],
)
def test_names_that_llama_cpp_treats_alike(tmp_path: Path, name: str, same: str) -> None:
    assert SPLITS[name] == SPLITS[same]
    a, b = load(write_model(tmp_path / "a.gguf", name)), load(write_model(tmp_path / "b.gguf", same))
    assert_same_ids(a, b.encode, TEXTS, name)


def test_tekken_splits_at_capitals(tmp_path: Path) -> None:
    """As in the tokenizer.json of Mistral NeMo: camel case is cut, and each digit is a word."""
    from tokenizers import Regex, pre_tokenizers

    (pattern,) = SPLITS["tekken"].patterns
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words = [word for word, _ in split.pre_tokenize_str("camelCase HTTPServer 123 don't a/b\n")]
    assert words == ["camel", "Case", " HTTPServer", " ", "1", "2", "3", " don", "'t", " a", "/b", "\n"]
    assert load(write_model(tmp_path / "m.gguf", "tekken")).encode("a")[0] == 256 + 15  # BOS
