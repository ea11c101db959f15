"""Sampling parameters, and outputs."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from distmk.errors import UsageError

_SHOWN_CHARS = 60


@dataclass(frozen=True)
class SamplingParams:
    """Greedy decoding of up to `max_tokens` tokens. Names as in vLLM. UsageError: a value of a wrong type, or one that is not
    greedy, which is not supported yet.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature, numbers.Real) or not 0 <= self.temperature <= 2:
            raise UsageError(f"temperature is {shown(self.temperature)}; expected 0 to 2")
        if not _is_number(self.max_tokens, numbers.Integral) or self.max_tokens < 1:
            raise UsageError(f"max_tokens is {shown(self.max_tokens)}; ask for at least one new token")
        object.__setattr__(self, "max_tokens", operator.index(self.max_tokens))  # numpy's numbers become Python's
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {shown(self.ignore_eos)}; expected True or False")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: object) -> str:
    """`value` as Python writes it, cut to a length that a message can hold."""
    if isinstance(value, int) and abs(value) >= 1 << 128:  # Python refuses to write numbers of thousands of digits
        return f"{'-' if value < 0 else ''}2**{abs(value).bit_length() - 1} or more"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


@dataclass(frozen=True)
class Logprob:
    """As in vLLM."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenOutput:
    """One generated token of prompt `index`: the text it adds, and on the last token `finish_reason`: stop or length.

    A request that was cancelled ends with `finish_reason` abort and `token_id` -1: no further token.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None
    logprobs: dict[int, Logprob] | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """All tokens generated for a prompt. `ms_per_token`: mean time between them.

    finish_reason: stop, length, abort if it was cancelled, or None if it is not over.
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

    @property
    def finished(self) -> bool:
        """Whether the completion ended of itself: by an end token, or at its full length."""
        return all(output.finish_reason in ("stop", "length") for output in self.outputs)
