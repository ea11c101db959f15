"""Log probabilities in OpenAI's two forms: of /v1/completions, and of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distmk.serving.sampling import Logprob
from distmk.serving.tokenizer import Tokenizer

LEAST = -9999.0  # for -inf, which JSON does not have; as in OpenAI and vLLM

TokenLogprobs = tuple[int, Mapping[int, Logprob] | None]
"""A token, and the log probabilities at its position: its own and the top ones (None: of the first token of a prompt)."""


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token alone, perhaps with U+FFFD for a part of a character; token_id:N for a model without tokenizer, as in vLLM."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs], num_top: int, offset: int
) -> dict[str, Any]:
    """The form of /v1/completions for some tokens, whose text begins `offset` characters behind the choice's beginning."""
    texts, chosen, top, offsets = [], [], [], []
    for token_id, logprobs in tokens:
        text = token_text(tokenizer, token_id)
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(None if logprobs is None else _value(logprobs[token_id]))
        top.append(
            None if logprobs is None else {token_text(tokenizer, i): _value(p) for i, p in _top(logprobs, num_top)}
        )
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": top}


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The form of /v1/chat/completions for some tokens."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        spelled = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": _value(logprob), "bytes": spelled}

    content = []
    for token_id, logprobs in tokens:
        assert logprobs is not None  # only the first token of a prompt has none
        top = [entry(i, logprob) for i, logprob in _top(logprobs, num_top)]
        content.append({**entry(token_id, logprobs[token_id]), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(
    tokenizer: Tokenizer | None, positions: Sequence[Mapping[int, Logprob] | None] | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's form, for every position of a prompt: by token id, the log probability, rank and text."""
    if positions is None:
        return None
    return [
        None
        if logprobs is None
        else {
            str(token_id): {"logprob": _value(one), "rank": one.rank, "decoded_token": token_text(tokenizer, token_id)}
            for token_id, one in logprobs.items()
        }
        for logprobs in positions
    ]


def _top(logprobs: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: item[1].logprob, reverse=True)[:count]


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
