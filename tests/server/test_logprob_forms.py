"""The two forms of log probabilities, of tokens that look alike and of parts of characters."""

from __future__ import annotations

import pytest
from support.byte_fallback import byte_fallback

from distmk.engine.logprobs import make_logprob
from distmk.server.openai_logprobs import (
    ScoredToken,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    scored,
    scored_prompt,
)
from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import Tokenizer

WORDS = ["▁", "▁en", "en", "a"]
SPACE, SPACED, BARE, LETTER, BOS = range(256, 261)
HAN = list("漢".encode())


def tokens_of(ids: list[int], others: dict[int, float], prompt: list[int]) -> list[ScoredToken]:
    """Each of `ids` with -1.5, beside `others`."""
    tokenizer = Tokenizer(byte_fallback(WORDS))
    speller, tokens = TokenSpeller(tokenizer, context=prompt), []
    for token_id in ids:
        values = {token_id: -1.5, **others}
        found = {each: make_logprob(each, value, 1, speller) for each, value in values.items()}
        speller.push(token_id)
        token = scored(token_id, found)
        assert token is not None
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("own", [SPACED, BARE])
def test_tokens_that_look_alike_have_keys_of_their_own(own: int) -> None:
    """At the beginning of a text _en is en, and the byte a is always a; the chosen one has the text, and else the better."""
    others = {SPACED: -0.5, BARE: -1.0, LETTER: -2.0, ord("a"): -1.9}
    (token,) = tokens_of([own], {each: value for each, value in others.items() if each != own}, prompt=[BOS])
    form = completion_logprobs([token], [0], num_top=4)
    other = BARE if own == SPACED else SPACED
    assert form["tokens"] == ["en"] and form["token_logprobs"] == [-1.5]
    assert form["top_logprobs"] == [
        {"en": -1.5, f"token_id:{other}": others[other], "a": -1.9, f"token_id:{LETTER}": -2.0}
    ]
    (behind,) = tokens_of([own], others, prompt=[BOS, LETTER])
    (top,) = completion_logprobs([behind], [0], num_top=2)["top_logprobs"]
    assert set(top) == {" en", "en"}


def test_the_token_itself_is_always_there() -> None:
    (token,) = tokens_of([LETTER], {SPACED: -0.5, BARE: -1.0, SPACE: -1.2}, prompt=[LETTER])
    for num_top, want in ((0, {"a"}), (1, {" en", "a"}), (2, {" en", "en", "a"}), (4, {" en", "en", "a", " "})):
        form = completion_logprobs([token], [0], num_top)
        assert set(form["top_logprobs"][0]) == want
        chat = chat_logprobs([token], num_top)["content"][0]
        assert chat["token"] == "a" and len(chat["top_logprobs"]) == num_top


def test_parts_of_characters() -> None:
    ids = [SPACED, *HAN, BARE, HAN[0], LETTER, BOS]
    tokens = tokens_of(ids, {ord("\n"): -3.0}, prompt=[LETTER])
    content = chat_logprobs(tokens, 1)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content) == " en漢en".encode() + bytes(HAN[:1]) + b"a"
    assert content[0]["bytes"] == list(b" en") and content[0]["top_logprobs"][0]["bytes"] == list(b" en")
    offsets = list(map(TextOffsets(7).push, tokens))
    assert offsets == [7, 10, 10, 10, 11, 13, 14, 15]  # of " en漢en\ufffda"
    shown = completion_logprobs(tokens, offsets, 0)["tokens"]
    assert shown == [" en", "bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", "en", "bytes:\\xe6", "a", "<s>"]


def test_without_a_tokenizer() -> None:
    found = {5: make_logprob(5, -1.0, 1, None), 6: make_logprob(6, -2.0, 2, None)}
    token = ScoredToken(5, found[5], found)
    first, second = scored_prompt(None, [6, 5], [None, found], skip_special=True)
    form = completion_logprobs([first, second, token], [0, 0, 0], 2)
    assert form["tokens"] == ["token_id:6", "token_id:5", "token_id:5"]
    assert form["top_logprobs"] == [None, *[{"token_id:5": -1.0, "token_id:6": -2.0}] * 2]
    assert chat_logprobs([token], 1)["content"][0]["bytes"] is None
