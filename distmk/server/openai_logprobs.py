"""Log probabilities in OpenAI's two forms: of /v1/completions, and of /v1/chat/completions.

A token is shown as the text that it adds behind the tokens before it. A part of a character is shown as bytes:\\xe2\\x80, as by
OpenAI, and a special token that the text leaves out by its name. Two tokens of one position may look alike: the chosen one, or
else the more probable one, keeps the text, and the other becomes token_id:N, as by vLLM. Without a tokenizer all are token_id:N.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distmk.api.outputs import Logprob, Tokenizer, token_string, unscored_token

LEAST = -9999.0  # for -inf, which JSON does not have; as in OpenAI and vLLM

Scores = Mapping[int, Logprob]
"""The log probabilities at a position, by token: its own token and the most probable ones."""


@dataclass(frozen=True)
class ScoredToken:
    """A token of a text. `scores`: at its position; None: it is the first one, and `own` tells its text alone."""

    token_id: int
    own: Logprob
    scores: Scores | None


def scored(token_id: int, scores: Scores | None) -> ScoredToken | None:
    """A generated token; None: log probabilities were not asked for."""
    return None if scores is None else ScoredToken(token_id, scores[token_id], scores)


def scored_prompt(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], positions: Sequence[Scores | None], skip_special: bool
) -> list[ScoredToken]:
    """The tokens of a prompt; the first one has no scores."""
    return [
        ScoredToken(i, unscored_token(tokenizer, i, skip_special) if scores is None else scores[i], scores)
        for i, scores in zip(token_ids, positions, strict=True)
    ]


class TextOffsets:
    """Where tokens begin in their text, in characters. Tokens of one character begin where the character does."""

    def __init__(self, begin: int = 0) -> None:
        self._at = begin
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: ScoredToken) -> int:
        """The offset of the next token."""
        spelled = token.own.token_bytes or b""
        if spelled and not 0x80 <= spelled[0] < 0xC0:  # it completes no character
            self._at += len(self._utf8.decode(b"", final=True))
        begin = self._at
        self._at += len(self._utf8.decode(spelled))
        return begin


def completion_logprobs(tokens: Sequence[ScoredToken], offsets: Sequence[int], num_top: int) -> dict[str, Any]:
    """The form of /v1/completions for some tokens, which begin at `offsets` of the choice's text.

    Each position has the `num_top` most probable tokens, and its own one in any case.
    """
    texts, chosen, top = [], [], []
    for token in tokens:
        own, scores = token.token_id, token.scores
        names = _names({own: token.own} if scores is None else scores, own)
        texts.append(names[own])
        chosen.append(None if scores is None else _value(scores[own]))
        shown = None if scores is None else {**dict(_top(scores, num_top)), own: scores[own]}
        top.append(None if shown is None else {names[i]: _value(one) for i, one in shown.items()})
    return {"text_offset": list(offsets), "token_logprobs": chosen, "tokens": texts, "top_logprobs": top}


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
    """The form of /v1/chat/completions for some tokens. Joined, the bytes of the tokens are the text."""

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        spelled = None if one.token_bytes is None else list(one.token_bytes)
        return {"token": _name(token_id, one), "logprob": _value(one), "bytes": spelled}

    return {
        "content": [
            {
                **entry(token.token_id, token.own),
                "top_logprobs": [entry(i, one) for i, one in _top(token.scores or {}, num_top)],
            }
            for token in tokens
        ]
    }


def prompt_logprobs(positions: Sequence[Scores | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's form, for every position of a prompt: by token id, the log probability, rank and text."""
    if positions is None:
        return None

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        text = f"token_id:{token_id}" if one.decoded_token is None else one.decoded_token
        return {"logprob": _value(one), "rank": one.rank, "decoded_token": text}

    return [None if scores is None else {str(i): entry(i, one) for i, one in scores.items()} for scores in positions]


def _name(token_id: int, one: Logprob) -> str:
    if one.token_bytes is None:
        return f"token_id:{token_id}"
    return token_string(one.token_bytes) if one.token_bytes else one.decoded_token or ""


def _names(scores: Scores, own: int) -> dict[int, str]:
    """A string for every token of a position, each another."""
    names: dict[int, str] = {}
    for token_id in (own, *(i for i, _ in _top(scores, len(scores)) if i != own)):
        name = _name(token_id, scores[token_id])
        names[token_id] = f"token_id:{token_id}" if name in names.values() else name
    return names


def _top(scores: Scores, count: int) -> list[tuple[int, Logprob]]:
    return sorted(scores.items(), key=lambda item: item[1].logprob, reverse=True)[:count]


def _value(one: Logprob) -> float:
    return max(one.logprob, LEAST)
