"""Text that is too long for a context is refused by its length: never one that fits, and without a stop of other threads."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
from support.byte_fallback import byte_fallback
from support.word_tokenizer import word_tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from distmk.errors import UsageError
from distmk.text.text_length import text_per_token
from distmk.text.tokenizer import BYTE_LEVEL, Tokenizer

CORPUS = ["the cat sat on the mat", "        indented", "----====", "1234 1234", "été ﬁ ﬃ Å漢字漢字", "ｶﾞｷﾞ 𝐀𝐁"]
PIECES = [
    "the cat", "a", " ", "      ", "\n\n\t", "1234", "----", "<end>", "  <end>   \n ", "é", "e\u0301", "\u03b1\u0313\u0300\u0345",
    "K", "\u212a\u212b", "ﬃ", "𝐀", "漢", "🙂", "\x04", "\U000f0000", "\u3000", "ｶﾞ", "\u1100\u1161\u11a8", "İ",
]  # fmt: skip
NORMALIZERS: list[Callable[[], normalizers.Normalizer] | None] = [
    None,
    normalizers.NFC,
    normalizers.NFKC,
    normalizers.NFD,
    normalizers.NFKD,
    normalizers.Lowercase,
    lambda: normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]),
    lambda: normalizers.Replace("      ", " "),
    lambda: normalizers.Replace("▁", " "),
    normalizers.StripAccents,
    lambda: normalizers.BertNormalizer(),
]
SPLITS: list[Callable[[], pre_tokenizers.PreTokenizer] | None] = [
    None,
    pre_tokenizers.Whitespace,
    pre_tokenizers.Metaspace,
    lambda: pre_tokenizers.Digits(individual_digits=True),
    lambda: pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed"), pre_tokenizers.Metaspace()]),
]


def drawn(rng: random.Random) -> Inner:
    """A trained tokenizer of any kind."""
    is_byte_level = rng.random() < 0.5
    fuse = {"unk_token": "<unk>", "fuse_unk": rng.random() < 0.5} if rng.random() < 0.5 else {}
    inner = Inner(models.BPE(**fuse) if rng.random() < 0.8 else models.Unigram())
    alphabet = list(BYTE_LEVEL) if is_byte_level else list("abc ▁")
    if rng.random() < 0.3:
        alphabet = rng.sample(alphabet, len(alphabet) * 2 // 3)
    if (normalizer := rng.choice(NORMALIZERS)) is not None:
        inner.normalizer = normalizer()
    if is_byte_level:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rng.random() < 0.5)
    elif (split := rng.choice(SPLITS)) is not None:
        inner.pre_tokenizer = split()
    special = ["<unk>", AddedToken("<end>", lstrip=rng.random() < 0.3, rstrip=rng.random() < 0.3)]
    size = len(alphabet) + rng.randrange(80, 160)
    options = {"initial_alphabet": alphabet, "special_tokens": special, "vocab_size": size, "show_progress": False}
    kind = trainers.BpeTrainer if isinstance(inner.model, models.BPE) else trainers.UnigramTrainer
    inner.train_from_iterator(CORPUS * 3, kind(**options))
    return inner


def test_the_bound_is_below_every_count() -> None:
    """The library counts. Each text is many copies of one piece, where a piece that vanishes shows, or any mixture."""
    seed = int(os.environ.get("DISTMK_TEST_SEED") or random.randrange(2**32))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    rng = random.Random(seed)
    num_bounded = 0
    for inner in [drawn(rng) for _ in range(400)] + [byte_fallback(["▁the", "▁cat"]), word_tokenizer()._inner]:
        bound = text_per_token(inner, BYTE_LEVEL)
        num_bounded += bound is not None
        if bound is None:
            continue
        texts = [piece * rng.randrange(1, 300) for piece in PIECES]
        texts += [" " * 2000 + "<end>", "<end>" + "\n" * 2000]
        texts += ["".join(rng.choices(PIECES, k=rng.randrange(40))) for _ in range(20)]
        for text in texts:
            assert bound.least_tokens(text) <= len(inner.encode(text).ids), (bound, text[:40], inner.to_str()[:500])
    assert num_bounded > 50


def test_the_bound_is_reached() -> None:
    tokenizer = word_tokenizer()
    bound = text_per_token(tokenizer._inner, BYTE_LEVEL)
    assert bound is not None and bound.least_tokens(" looked" * 500) == len(tokenizer.encode(" looked" * 500)) == 500
    assert len(tokenizer.encode(" looked" * 99, max_tokens=100)) == 99
    with pytest.raises(
        UsageError, match="of 700 characters has at least 100 tokens, which leaves no room in a context of 100"
    ):
        tokenizer.encode(" looked" * 100, max_tokens=100)
    assert text_per_token(Inner(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")), BYTE_LEVEL) is None


def test_long_text_is_encoded_as_short_text_is() -> None:
    for mine, inner in ((word_tokenizer(), word_tokenizer()._inner), (Tokenizer(byte_fallback(["▁the"])), None)):
        text = " the cat<|end|> é\n" * 400
        inner = inner or byte_fallback(["▁the"])
        assert mine.encode(text) == inner.encode(text).ids
        assert mine.encode(text, add_special=False) == inner.encode(text, add_special_tokens=False).ids


def test_other_threads_run_meanwhile() -> None:
    """Also those that encode, and those that write to stderr."""
    tokenizer, gaps_s, done = word_tokenizer(), [0.0], threading.Event()

    def watch() -> None:
        last_s = time.perf_counter()
        while not done.is_set():
            tokenizer.encode("the cat")
            now_s = time.perf_counter()
            gaps_s.append(now_s - last_s)
            last_s = now_s
            time.sleep(0.001)

    text = "1234567" * 150_000
    for _ in range(3):  # a busy machine may hold up one
        gaps_s[:] = [0.0]
        done.clear()
        thread = threading.Thread(target=watch)
        thread.start()
        began_s = time.perf_counter()
        tokenizer.encode(text)
        took_s = time.perf_counter() - began_s
        done.set()
        thread.join()
        if max(gaps_s) < took_s / 4:
            return
    raise AssertionError(f"another thread stood still for {max(gaps_s):.3f} s of {took_s:.3f} s")
