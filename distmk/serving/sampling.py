"""Sampling parameters, and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """Greedy decoding of up to `max_tokens` tokens. Names as in vLLM. UsageError: a setting that is not greedy, which is not
    supported yet.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature != 0.0:
            raise UsageError(f"temperature {self.temperature:g} is not supported yet; decoding is greedy: use 0")
        if self.top_p != 1.0 or self.top_k not in (0, 1, -1):
            raise UsageError("top_p and top_k are not supported yet; decoding is greedy: leave them out")
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; ask for at least one new token")


@dataclass(frozen=True)
class TokenOutput:
    """One generated token of prompt `index`: the text it adds, and on the last token `finish_reason`, stop or length."""

    index: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """All tokens generated for a prompt. `ms_per_token`: mean time between them.

    finish_reason: stop, length, or None if the completion is not finished.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    ms_per_token: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completion (`outputs` holds one, as in vLLM)."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
