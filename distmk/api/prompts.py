"""What users pass as prompts and as sampling parameters, in the forms that vLLM takes, as plain lists."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeGuard

from distmk.engine.sampling_params import SamplingParams
from distmk.errors import UsageError, shown
from distmk.parameter_checks import as_python
from distmk.text.chat.messages import ChatOptions, ChatPrompt

__all__ = ["ChatOptions", "Prompt", "Prompts", "either_params", "read_params", "read_prompt", "read_prompts"]

_EXPECTED = "expected text, a list of token ids, or a list of such prompts"
_TEXT, _IDS = "prompt", "prompt_token_ids"  # the keys of a dict


class IntArray(Protocol):
    """A numpy array or torch tensor of integers."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


class TextPrompt(TypedDict):
    """As in vLLM."""

    prompt: str


class TokensPrompt(TypedDict):
    """As in vLLM."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | IntArray | TextPrompt | TokensPrompt | ChatPrompt
Prompts = Prompt | Sequence[Prompt]


def read_prompts(given: object) -> list[str | list[int] | ChatPrompt]:
    """The prompts that a user gave, one or several: each is text, token ids or a conversation.

    A list of numbers, or an array of one dimension, is one prompt. UsageError: it is nothing of the kind.
    """
    if isinstance(given, ChatPrompt):
        return [*given.split()]
    plain = as_python(given)
    if not _is_list(plain) or _is_ids(plain):
        return [_read(plain, "the prompt")]
    if not plain:
        raise UsageError("there is no prompt; give at least one")
    several = len(plain) > 1
    return [_read(each, f"prompt {number}" if several else "the prompt") for number, each in enumerate(plain)]


def read_prompt(given: object) -> str | list[int] | ChatPrompt:
    """As `read_prompts`, of one prompt. UsageError: there are several."""
    prompts = read_prompts(given)
    if len(prompts) > 1:
        raise UsageError(f"{len(prompts)} prompts were given; this call takes one")
    return prompts[0]


def read_params(given: object, num_prompts: int) -> list[SamplingParams]:
    """The sampling parameters of each prompt, from None, one for all, or a list of one a prompt. UsageError: anything else."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    if not isinstance(given, list | tuple):
        raise UsageError(f"the sampling params are {_name(given)}; expected SamplingParams, or a list of one a prompt")
    for number, each in enumerate(given):
        if not isinstance(each, SamplingParams):
            raise UsageError(f"sampling params {number} are {_name(each)}; expected SamplingParams")
    if len(given) != num_prompts:
        raise UsageError(
            f"{num_prompts} prompts were given {len(given)} sampling params; give one for all, or one a prompt"
        )
    return list(given)


def either_params(params: object, sampling_params: object) -> object:
    """The one that was given. UsageError: both were."""
    if params is not None and sampling_params is not None:
        raise UsageError("params and sampling_params are two names of one argument; give one of them")
    return sampling_params if params is None else params


def _read(given: object, what: str) -> str | list[int] | ChatPrompt:
    if isinstance(given, ChatPrompt):
        return given
    plain = as_python(given)
    if isinstance(plain, Mapping):
        return _read_mapping(plain, what)
    if isinstance(plain, str):
        return str(plain)
    if not _is_list(plain):
        raise UsageError(f"{what} is {_name(plain)}; {_hint(plain)}{_EXPECTED}")
    return _read_ids(plain, what)


def _read_mapping(given: Mapping[Any, Any], what: str) -> str | list[int]:
    """The prompt of a TextPrompt or a TokensPrompt, which may have its text beside it."""
    keys = set(given)
    if not keys or not keys <= {_TEXT, _IDS}:
        had = ", ".join(shown(key) for key in given) or "nothing"
        raise UsageError(f"{what} is a dict of {had}; expected {{{_TEXT!r}: text}} or {{{_IDS!r}: token ids}}")
    inner = as_python(given[_IDS] if _IDS in keys else given[_TEXT])
    if _IDS in keys and not _is_list(inner):
        raise UsageError(f"{_IDS!r} of {what} is {_name(inner)}; {_hint(inner)}expected a list of token ids")
    if _IDS not in keys and not isinstance(inner, str):
        raise UsageError(f"{_TEXT!r} of {what} is {_name(inner)}; expected text; token ids go into {_IDS!r}")
    return str(inner) if isinstance(inner, str) else _read_ids(inner, what)


def _read_ids(given: Sequence[Any], what: str) -> list[int]:
    if set(map(type, given)) <= {int}:  # as nearly always, and found in a tenth of the time
        return list(given)
    ids = []
    for position, each in enumerate(given):
        value = as_python(each)
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise UsageError(
                f"{what} has {shown(value)} ({type(value).__name__}) at position {position}, where a token id is expected: "
                "a prompt is text or a list of whole numbers, and several prompts are a list of those"
            )
        ids.append(operator.index(value))
    return ids


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def _is_ids(given: Sequence[object]) -> bool:
    """Whether a list that begins so is one prompt of token ids, if it is right."""
    return len(given) > 0 and isinstance(as_python(given[0]), numbers.Number)


def _name(given: object) -> str:
    if given is None or isinstance(given, bool | numbers.Number):
        return shown(given)
    kind = type(given).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _hint(given: object) -> str:
    if isinstance(given, bytes | bytearray | memoryview):
        return "decode it to text first; "
    if hasattr(given, "__iter__") and not isinstance(given, str):
        return "make a list of it first; "
    return ""
