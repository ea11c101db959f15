"""Sampling parameters, and outputs."""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if not _is_number(self.temperature, numbers.Real) or self.temperature != 0.0:
            raise UsageError(f"temperature {shown(self.temperature)} is not supported yet; decoding is greedy: use 0")
        if self.top_p != 1.0 or self.top_k not in (0, 1, -1):
            raise UsageError("top_p and top_k are not supported yet; decoding is greedy: leave them out")
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
class TokenOutput:
    """One generated token of prompt `index`: the text it adds, and on the last token `finish_reason`: stop or length.

    A request that was cancelled ends with `finish_reason` abort and `token_id` -1: no further token.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None


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
    """A prompt and its completion (`outputs` holds one, as in vLLM).

    num_cached_tokens: of the prompt, those whose keys and values were cached; None if it has no token yet.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion ended of itself: by an end token, or at its full length."""
        return all(output.finish_reason in ("stop", "length") for output in self.outputs)
