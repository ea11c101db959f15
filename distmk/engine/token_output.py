"""What a request delivers: its tokens one by one, with their log probabilities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """As in vLLM, of one token at one position of a text.

    decoded_token: the text that the token adds behind the tokens before it, with U+FFFD for parts of characters. A special
    token that the text leaves out has its name here. token_bytes: the bytes that it adds, b"" if none. Joined, the bytes of
    the chosen tokens are the text. Both None: the model has no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass(frozen=True)
class TokenOutput:
    """One generated token of completion `index`: the text it adds, and on the last token `finish_reason`: stop or length.

    A request that was cancelled ends with `finish_reason` abort and `token_id` -1: no further token. So does one that failed
    alone, with `finish_reason` error and the line `error`. `stop_reason`: as of `CompletionOutput`.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None
    logprobs: dict[int, Logprob] | None = None
    stop_reason: int | str | None = None
    error: str | None = None
