"""Values of a conversation as plain JSON: what templates may see, without methods that they could misuse."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from distmk.errors import UsageError, shown

_MAX_DEPTH = 64


def plain(value: Any, what: str, depth: int = 0) -> Any:
    """A copy of a JSON value in Python's own types, without methods that a template could misuse. UsageError: it is none."""
    if depth > _MAX_DEPTH:
        raise UsageError(f"{what} is nested more than {_MAX_DEPTH} deep")
    value = dumped(value)
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{what} has the key {shown(key)}; keys are text")
        return {str(key): plain(item, f"{what}[{shown(key)}]", depth + 1) for key, item in value.items()}
    if is_list(value):
        return [plain(item, f"{what}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise UsageError(f"{what} is {value_name(value)}; expected what JSON can hold: text, numbers, lists and dicts")


def dumped(value: Any) -> Any:
    """Objects of the openai client and other pydantic models as dicts."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) and not isinstance(value, type) else value


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def value_name(value: object) -> str:
    if value is None or isinstance(value, bool | numbers.Number | str):
        return shown(value)
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
