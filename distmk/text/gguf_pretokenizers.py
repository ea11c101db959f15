"""How byte-level BPE of GGUF files splits text into words, by `tokenizer.ggml.pre`.

llama.cpp's `llama-vocab.cpp` has the names, and says which of them mean the same. The expressions come from the models'
tokenizer.json. Where llama.cpp has to approximate one (upper and lower case, long s), the original counts.

Not here: names that need more than expressions (kimi-k2, afmoe, superbpe, chameleon), and BPE without a byte level (gemma4,
granite-embed-multi-311m, sarvam-moe, whitespace).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Split:
    """How byte-level BPE splits text into words: each of `patterns` splits the words that the one before has made.

    Pieces between two matches are words as well. The syntax is Oniguruma's.

    whole_words: a word that is a token is encoded as that token, even if no merges lead there. bos: a prompt begins with BOS
    unless the file says otherwise. nfc: text is first normalized to Unicode's NFC.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


# What words are made of. ENDING is the second part of a contraction: 'll of I'll.
_ENDING = "'s|'t|'re|'ve|'m|'ll|'d"
_ENDING_ANY_CASE = f"(?i:{_ENDING})"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _BEFORE_WORD + r"\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_SYMBOL = r"[!-/:-@\[-`{-~]"
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_HAN_TO_HANGUL = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"


def _words_and(digits: str, symbols: str = _SYMBOLS + r"[\r\n]*") -> str:
    """Contractions in any case, words with one character in front, `digits`, `symbols`, line ends, spaces."""
    return _any(_ENDING_ANY_CASE, _WORD, digits, symbols, _LINES, _SPACES)


def _camel_case(digits: str, ending: str) -> str:
    """As `_words_and`, but a word also ends before a capital."""
    words = (rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{ending}", rf"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{ending}")
    return _any(*words, digits, _SYMBOLS + r"[\r\n/]*", _LINES, _SPACES)


def _deepseek_v3(symbols: str, lines: str) -> str:
    words = (_ASCII_SYMBOL + "[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
    return _any(*words, r" ?[\p{P}\p{S}]+" + symbols, lines, _SPACES)


_GPT2 = _any(_ENDING, r" ?\p{L}+", r" ?\p{N}+", _SYMBOLS, _SPACES)
_LLAMA3, _QWEN2 = _words_and(r"\p{N}{1,3}"), _words_and(r"\p{N}")
_QWEN35 = _any(
    *(_ENDING_ANY_CASE, _BEFORE_WORD + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _SPACES)
)
_GPT4O = _camel_case(r"\p{N}{1,3}", f"{_ENDING_ANY_CASE}?")
_JAIS2 = _any(
    *(_ENDING_ANY_CASE, _WORD, r"\p{N}{1,3}", _SYMBOLS + r"[\r\n]*", _LINES),
    *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)),
    r"\s{1,2}(?!\S)|\s",
)
_EXAONE_MOE = _any(
    *(_ENDING_ANY_CASE, _BEFORE_WORD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}", _SYMBOLS + r"[\r\n/]?"),
    *(_LINES, _SPACES),
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CASED = (  # letters with case as Unicode had them when DeepSeek's expression was written, without some scripts
    r"[\p{Lu}\p{Ll}\p{Lt}\x{295}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB6D}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16ED3}\x{1D400}-\x{1DF96}]]"
)
_DEEPSEEK_LLM = (
    *(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$", _HAN_TO_HANGUL, r"\p{N}+"),
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")
_YOUTU_SCRIPTS = _any(
    *(r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+", r"[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"),
    *(r"[\x{3105}-\x{312F}]+", _HAN_AND_KANA),
)

_PLAIN, _ONE_DIGIT = Split((_GPT2,)), Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT, _QWEN2_SPLIT, _GPT4O_SPLIT = Split((_LLAMA3,)), Split((_QWEN2,)), Split((_GPT4O,))
_DEEPSEEK_V3 = Split((r"\p{N}{1,3}", _HAN_AND_KANA, _deepseek_v3(r"[\r\n]*", _LINES)))

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "jais"), _PLAIN),
    **dict.fromkeys(("trillion", "granite-docling", "roberta-bpe", "jina-v1-en", "jina-v2-code"), _PLAIN),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _PLAIN),
    **dict.fromkeys(("mpt", "olmo"), replace(_PLAIN, nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _ONE_DIGIT),
    "command-r": replace(_ONE_DIGIT, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        replace(_LLAMA3_SPLIT, whole_words=True, bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_SPLIT),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3_SPLIT, whole_words=True)),
    "jais-2": Split((_JAIS2,)),
    "minicpm5": Split((r"\p{N}{1,3}", _words_and(r"\p{N}+")), whole_words=True),
    "qwen2": replace(_QWEN2_SPLIT, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "grok-2"), _QWEN2_SPLIT),
    **dict.fromkeys(("solar-open", "bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2_SPLIT),
    "qwen35": Split((_QWEN35,), nfc=True),
    "seed-coder": Split((_words_and(r"\p{N}", _SYMBOLS),)),
    "ufakzeka": Split((_any(_WORD, r"\p{N}", _SYMBOLS + r"[\r\n]*", _LINES, _SPACES),)),
    "laguna": Split((r"[^\n]+|\n+", _QWEN2)),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "tekken": Split((_camel_case(r"\p{N}", ""),), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_SPLIT),
    "granite-embed-multi-97m": replace(_GPT4O_SPLIT, whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    "youtu": Split((_YOUTU_SCRIPTS, _camel_case(r"\p{N}", f"{_ENDING_ANY_CASE}?")), whole_words=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "spark2_5": Split((r"\p{N}{1,3}", _HAN_AND_KANA, _deepseek_v3("", r"[\r\n]"), r"\p{N}")),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Split((_BLOOM,))),
    "viking": Split((_BLOOM, r"\p{N}")),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}")),
    "default": Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}")),
}
