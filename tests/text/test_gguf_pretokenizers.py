"""How byte-level BPE splits text, by name: against transformers' expressions, and against expressions for another engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import regex
from support.gguf_files import write_tokenizer
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from distmk.text.gguf_pretokenizers import SPLITS
from distmk.text.gguf_tokenizer import tokenizer_from_gguf
from distmk.weights.gguf_header import read_header
from distmk.weights.gguf_keys import check_pre_tokenizer

Words = Callable[[str], list[str]]

ALPHABET = "abzAI'srtSTlLvVeEdD  \t\n\r.,;:!?-_()[]{}<|>=+*/\\\"#$^`~&%@0129漢字かカ한ㄱé🙂½²٣Жжǅªʰſ"
ALPHABET += "…。，、—“”’中！～ㄅ\u0301\u3000"
TEXTS = (
    *("I'm you'LL they're camelCase HTTPServer XMLhttp don'T", "a1234567 12 3 4567.89 ١٢٣٤ ½", "x  y\n\n  z\r\n\tw   "),
    *(
        "naïve Ünï e\u0301te\u0301 1\u0301",
        "漢字カタカナ한국어，「。」！",
        "🙂👩‍👩‍👧 <tag>[a]{b}",
        "/path//x.py\n//\n",
        "a b c d",
        " ",
    ),
    *("ªº ʕʖ ֆա ⴀ ა Ა ꭰ ꞵ ｱＡａ 𝐀𝐛 𐐀", "   \n \n\n   x", "'s'S 'ſ 'll's"),
)

CONTRACTION = r"'(?i:s|t|re|ve|m|ll|d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
YOUTU = TEKKEN.replace("]+|[^", rf"]+(?:{CONTRACTION})?|[^").replace(r"]*|\p{N}", rf"]*(?:{CONTRACTION})?|\p{{N}}")
GPT4O = YOUTU.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (  # as DeepSeek spelled it
    r"A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    r"\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    r"\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    r"\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    r"\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    r"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    r"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
OTHER_ENGINE: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "chatglm-bpe": (LLAMA3,),
    "glm4": (LLAMA3,),
    "jais-2": (
        LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
        + "".join(rf"|\s{{{1 << i}}}(?!\S)" for i in range(9, 1, -1))
        + r"|\s{1,2}(?!\S)|\s",
    ),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
    "qwen2": (QWEN2,),
    "qwen35": (QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
    "bailingmoe": (QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),),
    "seed-coder": (QWEN2.replace(r"]+[\r\n]*", "]+"),),
    "ufakzeka": (QWEN2.removeprefix(CONTRACTION + "|"),),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "exaone-moe": (
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "youtu": (r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", YOUTU),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3),
    "spark2_5": (
        *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
        *(DEEPSEEK3.replace(r"]+[\r\n]*", "]+").replace(r"\s*[\r\n]+", r"[\r\n]"), r"\p{N}"),
    ),
    "deepseek-llm": (
        *(r"[\r\n]", rf"\s?[{CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$"),
        *("[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}+"),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}"),
    "bloom": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""One name of every group, as llama.cpp and the models' tokenizer.json have the expressions."""


def other_engine(patterns: Iterable[str]) -> Words:
    """Words by the `regex` package: every pattern splits the words of the one before."""
    compiled = [regex.compile(pattern) for pattern in patterns]

    def words(text: str) -> list[str]:
        pieces = [text]
        for pattern in compiled:
            cut = []
            for piece in pieces:
                ends = [0, *(at for match in pattern.finditer(piece) for at in match.span()), len(piece)]
                cut += [piece[a:b] for a, b in itertools.pairwise(ends) if a < b]
            pieces = cut
        return pieces

    return words


def tokenizers_words(patterns: Iterable[str]) -> Words:
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns])
    return lambda text: [word for word, _ in split.pre_tokenize_str(text)]


def texts() -> list[str]:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    pieces = [rng.choice(ALPHABET) * rng.choice((1, 1, 1, 1, 2, 3, 7)) for _ in range(6000)]
    return [*TEXTS, *("".join(pieces[at : at + rng.randrange(1, 40)]) for at in range(0, len(pieces), 30))]


def assert_same_words(name: str, want: Words, leave_out: str = "") -> None:
    mine = tokenizers_words(SPLITS[name].patterns)
    for text in (text.translate(dict.fromkeys(map(ord, leave_out))) for text in texts()):
        got, expected = mine(text), want(text)
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), "the end")
        assert got == expected, f"{name}: {text!r} differs at word {at}: got {got}, want {expected}"


@pytest.mark.parametrize("name", OTHER_ENGINE)
def test_words_are_those_of_another_engine(name: str) -> None:
    # Oniguruma counts numerals as letters of a word, which matters for the \b of this expression alone.
    assert_same_words(name, other_engine(OTHER_ENGINE[name]), leave_out="½²" if name == "tiny_aya" else "")


def test_every_split_is_compared() -> None:
    compared = {SPLITS[name].patterns for name in OTHER_ENGINE}
    assert [name for name, split in SPLITS.items() if split.patterns not in compared] == []


def test_words_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, pattern in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        if name not in ("qwen2", "llama-bpe", "tekken", "qwen35", "gpt-4o"):
            same = next(n for n in OTHER_ENGINE if SPLITS[n].patterns == SPLITS[name].patterns)
            assert mapping.GGUF_PRE_TOKENIZER_SPLITS.get(same, pattern) == pattern, name
        else:
            assert_same_words(name, tokenizers_words((pattern,)))


@pytest.mark.parametrize(("name", "digits"), [("gpt-2", False), ("command-r", True)])
def test_words_are_those_of_byte_level_itself(name: str, digits: bool) -> None:
    """GPT-2's and Cohere's tokenizer.json have these two parts in place of expressions."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level] if digits else [byte_level]
    )
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def words(text: str) -> list[str]:
        return [bytes(byte_of[letter] for letter in word).decode() for word, _ in parts.pre_tokenize_str(text)]

    assert_same_words(name, words)


def test_files_without_a_name(tmp_path: Path) -> None:
    """GPT-2's words and a warning, but for an architecture that has had only one tokenizer."""
    letters = list(bytes_to_unicode().values())
    for arch, want in (("llama", "gpt-2"), ("qwen2", "qwen2")):
        without = read_header(write_tokenizer(tmp_path / "m.gguf", "gpt2", letters, arch))
        named = read_header(write_tokenizer(tmp_path / "n.gguf", "gpt2", letters, arch, pre=want))
        mine, other = (tokenizer_from_gguf(header).pre_tokenizer.pre_tokenize_str for header in (without, named))
        assert all(mine(text) == other(text) for text in TEXTS)
        assert len(check_pre_tokenizer(without)) == (arch == "llama") and check_pre_tokenizer(named) == ()
    assert check_pre_tokenizer(read_header(write_tokenizer(tmp_path / "m.gguf", "llama", letters))) == ()
