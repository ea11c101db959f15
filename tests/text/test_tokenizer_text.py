"""Text from byte tokens, as it streams and as a whole: no character is cut, none is lost, and BOS is added once.

The oracle is the `tokenizers` library's decoding of all ids at once.
"""

from __future__ import annotations

import random

import pytest
from support.byte_fallback import byte_fallback
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.trainers import BpeTrainer

from distmk.abi import FinishReason
from distmk.api.input_processor import InputProcessor
from distmk.backends.launch_block import Token
from distmk.engine.sampling_params import SamplingParams
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.tokenizer import Tokenizer

BURMESE = "".join(map(chr, range(0x1000, 0x1020)))
ALPHABETS = {
    "burmese": BURMESE + " ",
    "emoji": "🙂👍🏽👩‍👩‍👧🇫🇷❤️ ",
    "cjk": "漢字かな交じり文한국어。 ",
    "mixed": BURMESE + "🙂👩‍👧漢字é½ thecat\n.\ufffd",
}
WORDS = ["▁", "▁the", "▁cat", "s", "a", "t", "h", "e", "c", "▁é", "漢"]


def byte_level(seed: int) -> LibraryTokenizer:
    """Byte-level BPE trained on shuffled bytes, so that many tokens begin and end inside characters."""
    rng = random.Random(seed)
    inner = LibraryTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    texts = [random_text(rng, rng.choice(list(ALPHABETS))) for _ in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(texts, BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    inner.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    return inner


def random_text(rng: random.Random, kind: str) -> str:
    return "".join(rng.choice(ALPHABETS[kind]) for _ in range(rng.randrange(1, 40)))


def whole_characters(inner: LibraryTokenizer, ids: list[int], count: int) -> str:
    """What the first `count` tokens have of the library's text of all: the longest start of it that some of them decode to."""
    whole = inner.decode(ids)
    starts = [inner.decode(ids[: max(0, count - cut)]) for cut in range(4)]
    starts += [start.rstrip("\ufffd") for start in starts]
    return max((start for start in starts if whole.startswith(start)), key=len)


@pytest.mark.parametrize("kind", ["fallback", "level"])
def test_every_prefix_of_a_reply_is_the_text(kind: str) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    inner = byte_fallback(WORDS) if kind == "fallback" else byte_level(seed)
    mine = Tokenizer(inner)
    for _ in range(150):
        alphabet = rng.choice(list(ALPHABETS))
        text = random_text(rng, alphabet) + random_text(rng, alphabet)
        ids = inner.encode(text).ids
        whole = inner.decode(ids)
        assert whole == (text.removeprefix(" ") if kind == "fallback" else text)
        split = rng.randrange(len(ids))
        what = f"seed {seed}: {text!r}, prompt {ids[:split]}, reply {ids[split:]}"
        stream = StreamDecoder(mine, context=ids[:split])
        told = whole_characters(inner, ids, split)  # a character that the prompt only begins is the reply's
        if "\ufffd" in text and told.endswith("\ufffd"):
            continue  # nobody can tell whether the prompt ends inside it
        for count, token in enumerate(ids[split:], split + 1):
            told += stream.push(token)
            assert whole.startswith(told), what
            if "\ufffd" not in text:  # nothing whole is held back
                assert told == whole_characters(inner, ids, count), what
        assert told + stream.flush() == whole, what


def test_wrong_bytes_spoil_only_themselves() -> None:
    """Random bytes: no more U+FFFD than the library's whole text has, and no valid character lost."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for inner, exact in ((byte_fallback(WORDS), False), (byte_level(seed), True)):
        mine = Tokenizer(inner)
        for _ in range(200):
            ids: list[int] = []
            for _ in range(rng.randrange(1, 8)):
                text_ids = inner.encode(random_text(rng, "mixed"), add_special_tokens=False).ids
                ids += text_ids if rng.random() < 0.7 else [rng.randrange(256) for _ in range(rng.randrange(1, 4))]
            stream = StreamDecoder(mine)
            told = "".join([stream.push(token) for token in ids]) + stream.flush()
            whole = inner.decode(ids)
            assert told.count("\ufffd") <= whole.count("\ufffd"), f"seed {seed}: {ids}"
            if exact:
                assert told == whole, f"seed {seed}: {ids}"
                split = rng.randrange(len(ids))
                ids = ids[:split] + [rng.randrange(500) for _ in range(3)] + ids[split:]
                whole = inner.decode(ids)
                stream = StreamDecoder(mine, context=ids[:split])
                told = "".join([stream.push(token) for token in ids[split:]]) + stream.flush()
                in_prompt = len(
                    inner.decode(ids[:split])
                )  # its last character may be half of one that the reply completes
                assert whole.endswith(told), f"seed {seed}: {ids}, {split}"
                assert in_prompt - 1 <= len(whole) - len(told) <= in_prompt, f"seed {seed}: {ids}, {split}"
            else:
                raw = b"".join(mine.token_bytes(token) for token in ids)
                kept = raw.decode(errors="replace").replace("▁", " ").removeprefix(" ").replace("\ufffd", "")
                assert told.replace("\ufffd", "") == kept, f"seed {seed}: {ids}"


def test_burmese_behind_a_burmese_prompt() -> None:
    """The end of the prompt that the decoder is given is not cut inside a character: once 90 x U+FFFD for 30 of them."""
    mine = Tokenizer(byte_fallback(WORDS))
    for length in range(1, 12):
        request = InputProcessor(1000, 1000, mine).make_requests(BURMESE[:length], SamplingParams())[0]
        ids = mine.encode(BURMESE[:30])[2:]  # without BOS and the first space
        for number, token in enumerate(ids):
            request.append(Token(0, token, int(number == len(ids) - 1) * FinishReason.LENGTH, 0))
        assert "".join(request.pieces) == BURMESE[:30]


def test_a_prompt_that_ends_inside_a_character() -> None:
    mine = Tokenizer(byte_fallback(WORDS))
    first, second, third = mine.encode(BURMESE[5])[2:]
    stream = StreamDecoder(mine, context=[258, first, second])
    assert [stream.push(third), stream.push(257)] == [BURMESE[5], " the"]
    stream = StreamDecoder(mine, context=[258, first, second])  # the reply does not complete it
    assert [stream.push(257), stream.push(first), stream.flush()] == [" the", "", "\ufffd"]
    stream = StreamDecoder(mine, context=[258, first, second])
    assert stream.flush() == ""
    bos = 256 + len(WORDS)
    stream = StreamDecoder(mine, context=[258, *[bos] * 20])  # special tokens are no context
    assert stream.push(257) == " the"


def test_stop_tokens_are_no_text() -> None:
    """A stop token that is not marked as special leaves no text."""
    mine = Tokenizer(byte_fallback(WORDS))
    request = InputProcessor(1000, 1000, mine).make_requests("the", SamplingParams())[0]
    for token, finish in ((258, FinishReason.NONE), (257, FinishReason.STOP)):
        request.append(Token(0, token, finish, 0))
    assert (request.pieces, request.token_ids) == ([" cat", ""], [258, 257])


def test_bos_is_added_once() -> None:
    for bos in (True, False):
        inner = byte_fallback(WORDS, bos)
        mine, special = Tokenizer(inner), 256 + len(WORDS)
        plain = inner.encode("the", add_special_tokens=False).ids
        assert mine.encode("the") == [special] * bos + plain
        assert mine.encode("<s>the") == inner.encode("<s>the", add_special_tokens=False).ids
        assert mine.encode("<s>the")[:2] != [special, special]
        assert mine.encode("<s>") == [special]
        assert mine.encode("") == [special] * bos
        # a second one in the text is the author's
        assert mine.encode("<s><s>") == [special, special]
        assert mine.encode("the<s>") == [*[special] * bos, *plain, special]


def test_two_tokens_in_front_are_added_once() -> None:
    inner = byte_fallback(WORDS, bos=False)
    special = 256 + len(WORDS)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> a $A <s>", special_tokens=[("<s>", special), ("a", 260)]
    )
    mine = Tokenizer(inner)
    assert mine.encode("<s>the")[:3] == [special, 260, special]  # only the first of the two is in the text
    inner.post_processor = processors.TemplateProcessing(single="<s> <s> $A <s>", special_tokens=[("<s>", special)])
    assert mine.encode("<s><s>")[:2] == [special, special]
    assert len(mine.encode("<s><s>")) == 3
