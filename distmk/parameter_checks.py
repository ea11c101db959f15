"""Checks of values that callers give, one by one. The results have Python's own types."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from distmk.env import MOST_SECONDS
from distmk.errors import UsageError, shown


def whole(name: str, value: Any, least: int, most: int, expected: str) -> int:
    """A whole number; numpy's numbers are accepted. UsageError: `value` is not one, or out of range."""
    number = as_python(value)
    if not _is_number(number, numbers.Integral) or not least <= number <= most:
        raise _wrong(name, value, expected)
    return operator.index(number)


def real(name: str, value: Any, least: float, most: float, expected: str, above: bool = False) -> float:
    """A number from `least` (`above`: greater than `least`) to `most`. UsageError: `value` is not a number, or out of range."""
    number = as_python(value)
    if not _is_number(number, numbers.Real) or not (least < number if above else least <= number) or not number <= most:
        raise _wrong(name, value, expected)  # also for nan
    return float(number)


def deadline(seconds: Any) -> float:
    """Seconds without progress after which a launch is given up. UsageError: not a positive number, or too large."""
    expected = f"more than 0 and at most {MOST_SECONDS:g} seconds"
    return real("deadline_s", seconds, 0, MOST_SECONDS, expected, above=True)


def flag(name: str, value: Any) -> bool:
    """True or False. UsageError: `value` is neither."""
    value = as_python(value)
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def text(name: str, value: Any) -> str:
    """Text, or a path as text. UsageError: `value` is neither, or empty."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _wrong(name, value, "text")
    return os.fsdecode(value)


def strings(name: str, value: Any) -> list[str]:
    """A text, None, or a list of texts, as a list. UsageError: `value` is something else."""
    value = as_python(value)
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if not _is_list(value) or not all(isinstance(each, str) for each in value):
        raise _wrong(name, value, "text, or a list of texts")
    return list(value)


def token_ids(name: str, value: Any) -> list[int]:
    """A list or array of token ids, or None, as a list. UsageError: `value` is something else."""
    value = as_python(value)
    if value is None:
        return []
    ids = [as_python(each) for each in value] if _is_list(value) else None
    if ids is None or not all(map(_is_token_id, ids)):
        raise _wrong(name, value, "a list of token ids")
    return [operator.index(each) for each in ids]


def biases(name: str, value: Any, most: float) -> dict[int, float] | None:
    """None, or numbers from -`most` to `most` by token id. UsageError: `value` is something else."""
    if value is None:
        return None
    expected = f"numbers from {-most:g} to {most:g} by token id"
    if not isinstance(value, Mapping):
        raise _wrong(name, value, expected)
    for token_id, bias in value.items():
        right = _is_token_id(token_id) and _is_number(bias, numbers.Real) and math.isfinite(bias) and abs(bias) <= most
        if not right:
            raise UsageError(f"{name} has {shown(bias)} for {shown(token_id)}; expected {expected}")
    return {operator.index(token_id): float(bias) for token_id, bias in value.items()}


def as_python(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as lists and numbers of Python; anything else unchanged."""
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, str | memoryview)
    return value.tolist() if is_array else value


def _wrong(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {shown(value)}; expected {expected}")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return _is_number(value, numbers.Integral) and 0 <= value < 1 << 31


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
