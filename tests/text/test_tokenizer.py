"""Tokenizers against transformers' own, and streamed text against text decoded at once."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.byte_fallback import byte_fallback
from support.gguf_files import write_gguf
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from distmk.errors import ModelError, UsageError
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.tokenizer import Tokenizer, load_tokenizer
from distmk.weights import open_checkpoint

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading and three   inner spaces ",
    "I'm sure they'LL say it's 12345 or 3.14159 (100%).",
    "def f(x):\n    return x ** 2  # squared\n\n\n\tif not x:\r\n        pass\n",
    "naïve café Ünïcödé — “quotes” … ½ x² ٣٤ Ⅷ",
    "漢字かな交じり文。한국어 텍스트 Привет, мир",
    "🙂 👩‍👩‍👧‍👦 🇫🇷",
    "e\u0301 \u1e9b\u0323",  # not in NFC
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "line\r\n\r\n  indented\n \n",
    "\x00\x1f\u200b\ufeff\ufffd",
]
ALPHABET = "abz AI'stré漢🙂ſ0129٣½²  \t\n\r.,;:!?-_()[]{}<|>=+*/\\\"#"

FALLBACK_WORDS = ["▁", "▁the", "▁cat", "s", "▁sat", "a", "▁é"]


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(ALPHABET) for _ in range(rng.randrange(60))) for _ in range(count)]


def write_model(path: Path, pre: str | None, model: str = "gpt2", **edits: Any) -> Path:
    """A small GGUF model with a byte-level vocabulary: 256 bytes, some merges, three added tokens."""
    letters = list(bytes_to_unicode().values())
    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "12 3", "Ã ©", "Ġ 1", "' s", "Ċ Ċ", "a b", "Ġ a"]
    tokens = letters + [merge.replace(" ", "") for merge in merges]
    tokens += ["ĠwholeWord"]  # a token that no merge leads to
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

    def edit(w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model(model)
        if pre:
            w.add_tokenizer_pre(pre)
        w.add_token_list([*tokens, *added, "<think>"])
        w.add_token_types([1] * len(tokens) + [edits.get("type", 3)] * len(added) + [4])
        w.add_token_merges(edits.get("merges", merges))
        w.add_bos_token_id(edits.get("bos", len(tokens)))
        if "add_bos" in edits:
            w.add_add_bos_token(edits["add_bos"])
        if "add_eos" in edits:
            w.add_eos_token_id(len(tokens) + 2)
            w.add_add_eos_token(edits["add_eos"])

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(tokens) + 4,
        head_dim=16, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(1)
    write_gguf(path, config, LlamaForCausalLM(config).state_dict(), edit=edit)
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(path))


def assert_same_ids(got: Tokenizer, want: Any, texts: list[str], note: str) -> None:
    for text in texts:
        ids, expected = got.encode(text), want(text)
        at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), "the end")
        assert ids == expected, f"{note}: {text!r} differs at {at}: got {ids}, want {expected}"


@pytest.mark.parametrize("pre", ["gpt-2", None, "qwen2", "llama-bpe"])
def test_gguf_matches_transformers(tmp_path: Path, pre: str | None) -> None:
    path = write_model(tmp_path / "m.gguf", pre, add_bos=False)
    hf = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    seed = random.randrange(1 << 30)
    texts = TEXTS + random_texts(300, seed) + [" <think>the ab</think>"]
    if pre == "qwen2":  # transformers leaves out Qwen's normalizer when it reads a GGUF file
        from tokenizers import normalizers

        hf.backend_tokenizer.normalizer = normalizers.NFC()
    mine = load(path)
    assert_same_ids(mine, hf.encode, texts, f"seed {seed}")
    for text in texts:
        ids = hf.encode(text)
        assert mine.decode(ids, False) == hf.decode(ids)
        assert mine.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_smollm_splits_digits_first(tmp_path: Path) -> None:
    """transformers has no entry for "smollm", so its oracle gets the parts of SmolLM2's tokenizer.json."""
    path = write_model(tmp_path / "m.gguf", "smollm")
    hf = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    hf.backend_tokenizer.pre_tokenizer = smollm_parts()
    seed = random.randrange(1 << 30)
    assert_same_ids(load(path), hf.encode, [*TEXTS, "a  1 123", *random_texts(300, seed)], f"seed {seed}")


def smollm_parts() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def test_bos(tmp_path: Path) -> None:
    bos = 256 + 15
    for pre, edits, want in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos": True}, True),
    ):
        mine = load(write_model(tmp_path / "m.gguf", pre, **edits))
        ids = mine.encode("the")
        assert (ids[0] == bos) == want, (pre, edits)
        assert mine.decode(ids) == "the"
        assert mine.is_special(bos)


def test_eos_behind_a_prompt(tmp_path: Path) -> None:
    """Only where the file asks for it, as llama.cpp does."""
    bos, eos = 256 + 15, 256 + 17
    for edits, want in (
        ({"add_eos": True}, [eos]),
        ({"add_eos": False}, []),
        ({"add_eos": True, "add_bos": True}, [bos, eos]),
    ):
        mine = load(write_model(tmp_path / "m.gguf", "qwen2", **edits))
        assert mine.encode("") == want
        assert (mine.encode("the")[-1] == eos) == (eos in want)
    assert mine.encode("<|endoftext|>the") == mine.encode("the")  # the text's own BOS


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_stop_tokens_are_special_whatever_their_type(tmp_path: Path, kind: int) -> None:
    """Files exist that call them normal or user-defined; in a prompt they are one token, in a reply no text."""
    mine = load(write_model(tmp_path / "m.gguf", "qwen2", type=kind))
    im_start, im_end = 256 + 16, 256 + 17
    ids = mine.encode("the<|im_end|>a")
    assert im_end in ids and mine.is_special(im_end)
    assert mine.decode(ids) == "thea"
    assert mine.is_special(im_start) == (kind == 3)


def test_llama3_takes_whole_words(tmp_path: Path) -> None:
    whole = 256 + 14
    assert load(write_model(tmp_path / "a.gguf", "llama-bpe", add_bos=False)).encode(" wholeWord") == [whole]
    assert len(load(write_model(tmp_path / "b.gguf", "qwen2")).encode(" wholeWord")) == len(" wholeWord")


@pytest.mark.parametrize(
    ("model", "pre", "edits", "error", "message"),
    [
        ("rwkv", "default", {}, UsageError, "tokenizer kind 'rwkv' is not supported"),
        ("llama", "default", {}, ModelError, "the tokenizer is damaged: it has 275 tokens and 0 scores"),
        ("gpt2", "gpt-5", {}, UsageError, "pre-tokenizer 'gpt-5' is not supported"),
        ("gpt2", "qwen2", {"merges": ["a b c"]}, ModelError, "the tokenizer is damaged"),
        ("gpt2", "qwen2", {"merges": ["ab zz"]}, ModelError, "the tokenizer is damaged"),
        ("gpt2", "qwen2", {"bos": 9999, "add_bos": True}, ModelError, "BOS token 9999 is outside the vocabulary"),
    ],
)
def test_gguf_errors(tmp_path: Path, model: str, pre: str, edits: Any, error: type[UsageError], message: str) -> None:
    path = write_model(tmp_path / "m.gguf", pre, model, **edits)
    open_checkpoint(path).close()  # the weights alone are fine
    with pytest.raises(error) as e:
        load(path)
    assert message in str(e.value)
    assert "\n" not in str(e.value)
    if error is UsageError:
        assert "--prompt-ids" in str(e.value)


def test_model_without_a_tokenizer(tmp_path: Path) -> None:
    for where in ("qwen3-8b", small_folder(tmp_path)):
        with pytest.raises(UsageError, match="--prompt-ids") as e:
            load_tokenizer(open_checkpoint(where, "dummy"))
        assert "\n" not in str(e.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a valid tokenizer.json") as e:
        load_tokenizer(open_checkpoint(tmp_path, "dummy"))
    assert "\n" not in str(e.value)


def small_folder(path: Path) -> Path:
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


def test_tokenizer_json(tmp_path: Path) -> None:
    """Special tokens come from the file's own template; truncation stored in it is not obeyed."""
    inner = byte_fallback(FALLBACK_WORDS)
    inner.enable_truncation(3)
    inner.save(str(small_folder(tmp_path) / "tokenizer.json"))
    mine = load_tokenizer(open_checkpoint(tmp_path, "dummy"))
    inner.no_truncation()
    for text in ("the cats sat", " the cat é漢", ""):
        assert mine.encode(text) == inner.encode(text).ids
        assert mine.encode(text)[0] == 263
    assert len(mine.encode("the cats sat")) > 3
    assert mine.decode(mine.encode("the cat")) == "the cat"
    with pytest.raises(UsageError, match="not valid Unicode at character 1"):
        mine.encode("a\udcff")
    with pytest.raises(UsageError, match="token id -1 is not a token"):
        mine.decode([-1])


@pytest.mark.parametrize("kind", ["gguf", "json"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_streamed_text_is_the_text(tmp_path: Path, kind: str, skip_special: bool) -> None:
    mine = (
        load(write_model(tmp_path / "m.gguf", "qwen2")) if kind == "gguf" else Tokenizer(byte_fallback(FALLBACK_WORDS))
    )
    num_tokens = 256 + (19 if kind == "gguf" else 8)
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    print("seed", seed)
    real = [mine.encode(text) for text in TEXTS]
    noise = [[rng.randrange(num_tokens) for _ in range(rng.randrange(12))] for _ in range(300)]
    # Byte fallback turns a whole run of bytes to U+FFFD when one of them is wrong, even those already given out.
    for ids in real + noise if kind == "gguf" else real:
        stream = StreamDecoder(mine, skip_special)
        pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        assert "".join(pieces) == mine.decode(ids, skip_special), f"seed {seed}: ids {ids}, pieces {pieces}"
    for ids in real:  # whole text never shows a broken character on the way
        stream = StreamDecoder(mine, skip_special)
        text = mine.decode(ids, skip_special)
        assert "\ufffd" in text or not any("\ufffd" in stream.push(token_id) for token_id in ids)


def test_stream_gives_text_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    mine = load(write_model(tmp_path / "m.gguf", "qwen2"))
    stream = StreamDecoder(mine)
    assert [stream.push(token_id) for token_id in mine.encode("a🙂b")] == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""
    half = mine.encode("🙂")[:2]
    assert [stream.push(token_id) for token_id in half] == ["", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(mine.encode("x")[0]) == "x"


def test_stream_continues_a_prompt() -> None:
    mine = Tokenizer(byte_fallback(FALLBACK_WORDS))
    the, cat, sat, special = 257, 258, 260, 263
    alone, after = StreamDecoder(mine), StreamDecoder(mine, context=[the])
    assert (alone.push(cat), after.push(cat)) == ("cat", " cat")
    assert [after.push(special), after.push(sat), after.flush()] == ["", " sat", ""]


@pytest.mark.whole
def test_real_tokenizer_matches_transformers(smollm2: Path) -> None:
    hf = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    mine = load(smollm2)
    seed = random.randrange(1 << 30)
    texts = TEXTS + random_texts(1000, seed)
    # Without the digits step that transformers leaves out, the two agree where no number character follows white space.
    plain = [t for t in texts if not any(a.isspace() and b.isnumeric() for a, b in itertools.pairwise(t))]
    assert len(plain) > 300
    assert_same_ids(mine, hf.encode, plain, f"seed {seed}")
    hf.backend_tokenizer.pre_tokenizer = smollm_parts()
    assert_same_ids(mine, hf.encode, texts, f"seed {seed}")
    for text in texts:
        ids = mine.encode(text)
        assert mine.decode(ids, False) == hf.decode(ids) == text
        stream = StreamDecoder(mine, skip_special=False)
        assert "".join([stream.push(token_id) for token_id in ids] + [stream.flush()]) == text
