"""`SamplingParams`: how the tokens of a completion are chosen, and where it ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from distmk.absent_parameters import UnsupportedError, refusal, suggestion, takes_absent
from distmk.engine.absent_sampling import SAMPLING
from distmk.engine.structured_outputs import StructuredOutputsParams
from distmk.errors import UsageError, shown
from distmk.parameter_checks import biases, flag, real, strings, token_ids, whole
from distmk.text.stop_strings import check_stop_strings

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_TEMPERATURE = 100.0
MAX_COMPLETIONS = 128  # of one prompt
_MOST = (1 << 31) - 1
_SEEDS = (-(1 << 63), (1 << 63) - 1)


class RequestOutputKind(Enum):
    """What the outputs of `AsyncLLM.generate` hold, as in vLLM."""

    CUMULATIVE = 0  # all tokens so far
    DELTA = 1  # those since the last output
    FINAL_ONLY = 2  # all tokens, in one output


@takes_absent(SAMPLING)
@dataclass
class SamplingParams:
    """How the tokens of a completion are chosen, and where it ends. Names are vLLM's, defaults differ. UsageError: a wrong value.

    Values may be changed: they are checked again when a request is made, which keeps a copy.

    `max_tokens`: of the completion; None: as many as the context has room for. `n`: completions of the prompt.

    The distribution is the softmax of logits / `temperature` (0: the best token). The `top_k` most probable tokens (0 or -1:
    all) are kept, then the fewest whose probabilities sum up to `top_p`, then every token with at least `min_p` of the
    highest probability. `seed` (None: one that the engine's seed gives): a token's random number follows from seed, position
    and token id alone. A request with a seed gives the same text when it is repeated, alone or in company, but for
    rounding. Rounding seldom matters while up to 16 such requests run at once, and never with
    `LLM(deterministic=True)`. Before the softmax, logits are changed: `logit_bias` is added by token id;
    `presence_penalty` is taken off once, and `frequency_penalty` as often as the token was generated;
    `repetition_penalty` divides positive logits, and multiplies others, of tokens of the prompt or the completion.
    `LLM` takes biases of up to 300 tokens, and with `min_tokens` up to 84 end and stop tokens.

    The end: a token of `stop_token_ids` or of the model (not with `ignore_eos`), or a text of `stop`, which may be a special
    token. The completion does not show it (unless `include_stop_str_in_output`); none of them ends it before `min_tokens`
    tokens. `skip_special_tokens`: the text leaves special tokens out.

    `logprobs`: how many of the most probable tokens get a log probability at every position of the completion, beside the
    token itself; 0: the token alone; None: no log probabilities. `prompt_logprobs`: the same for the prompt. `output_kind`: of
    the outputs of `AsyncLLM.generate`.

    `structured_outputs`: the form that the completion is held to. It ends with an end token, once the form is complete; stop
    strings, stop tokens and `max_tokens` may end it before. In answers of chats the form begins behind the reasoning, which
    takes at most `thinking_token_budget` tokens (None or -1: any number) before its end is forced.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "temperature": real("temperature", self.temperature, 0, MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}"),
            "top_p": real("top_p", self.top_p, 0, 1, "more than 0 and at most 1", above=True),
            "top_k": whole("top_k", self.top_k, -1, _MOST, "1 or more, or 0 or -1 for all tokens"),
            "min_p": real("min_p", self.min_p, 0, 1, "0 to 1"),
            "n": whole("n", self.n, 1, MAX_COMPLETIONS, f"1 to {MAX_COMPLETIONS}"),
            "presence_penalty": real("presence_penalty", self.presence_penalty, -2, 2, "-2 to 2"),
            "frequency_penalty": real("frequency_penalty", self.frequency_penalty, -2, 2, "-2 to 2"),
            "repetition_penalty": real(
                "repetition_penalty", self.repetition_penalty, 0, 100, "more than 0 and at most 100", above=True
            ),
            "logit_bias": biases("logit_bias", self.logit_bias, MAX_BIAS),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "stop": strings("stop", self.stop),
            "stop_token_ids": token_ids("stop_token_ids", self.stop_token_ids),
            "include_stop_str_in_output": flag("include_stop_str_in_output", self.include_stop_str_in_output),
            "skip_special_tokens": flag("skip_special_tokens", self.skip_special_tokens),
            "output_kind": _output_kind(self.output_kind),
            "structured_outputs": _structured_outputs(self.structured_outputs),
            "thinking_token_budget": _budget(self.thinking_token_budget),
        }
        if self.max_tokens is not None:
            checked["max_tokens"] = whole(
                "max_tokens", self.max_tokens, 1, _MOST, "1 or more, or None for all that fit"
            )
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, *_SEEDS, "a whole number of 64 bits, or None")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                checked[name] = whole(name, count, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_stop_strings(self.stop)
        most = _MOST if self.max_tokens is None else self.max_tokens
        expected = "0 or more" if self.max_tokens is None else f"0 to max_tokens, which is {most}"
        object.__setattr__(self, "min_tokens", whole("min_tokens", self.min_tokens, 0, most, expected))
        for name in ("min_tokens", "ignore_eos") if self.structured_outputs is not None else ():
            if getattr(self, name):
                value = getattr(self, name)
                raise UsageError(
                    f"{name} is {value}; with structured_outputs an answer ends where its form is complete"
                )

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dataclass_fields__:
            object.__setattr__(self, name, value)
        elif name not in SAMPLING:
            close = suggestion(name, self.__dataclass_fields__.keys())
            raise UnsupportedError(f"SamplingParams has no parameter {name!r}{close}")
        elif refused := refusal(name, value, SAMPLING):
            raise UnsupportedError(refused)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def checked(self, **changes: object) -> SamplingParams:
        """A copy with `changes`, whose values are checked again. UsageError: one is wrong."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _structured_outputs(value: object) -> StructuredOutputsParams | None:
    """UsageError: it is none."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    raise UsageError(f"structured_outputs is {shown(value)}; expected StructuredOutputsParams, such as of json=schema")


def _budget(value: object) -> int | None:
    """UsageError: it is none."""
    if value is None:
        return None
    budget = whole("thinking_token_budget", value, -1, _MOST, "0 or more, or None or -1 for any number of tokens")
    return None if budget == -1 else budget


def _output_kind(value: object) -> RequestOutputKind:
    """UsageError: it is none."""
    try:
        return RequestOutputKind(getattr(value, "value", value))  # vLLM's own kinds have the same values
    except ValueError:
        names = ", ".join(f"RequestOutputKind.{each.name}" for each in RequestOutputKind)
        raise UsageError(f"output_kind is {shown(value)}; expected {names}") from None
