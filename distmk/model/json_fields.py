"""Typed look-ups in a model file's JSON object or metadata, with errors that name the key and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distmk.errors import ModelError, shown


@dataclass(frozen=True)
class Fields:
    """A dict with typed look-ups. Each raises a one-line ModelError that names the key and `where`, the source of the dict.

    A key whose value is null counts as absent. An absent key without a default is an error.
    """

    values: Mapping[str, Any]
    where: str

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number below 2**63 in magnitude. True and false do not count as numbers."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: {key} is missing; a whole number was expected")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
            raise ModelError(f"{self.where}: {key} is {shown(value)}; a whole number was expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: {key} is missing; a number was expected")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.where}: {key} is {shown(value)}; a number was expected")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ModelError(f"{self.where}: {key} is not finite; an ordinary number was expected")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {shown(value)}; true or false was expected")
        return default if value is None else value

    def sub(self, key: str) -> Fields:
        """The fields of a nested object. If the key is absent, there are no fields."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {key} is {shown(value)}; an object was expected")
        return Fields(value or {}, f"{self.where}: {key}")


def token_ids(d: Mapping[str, Any], key: str, where: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The distinct token ids under `key`, in order: a number, a list of numbers, null (no ids), or absent (`default`).

    Raises ModelError, naming `key` and `where`, for any other value.
    """
    value = d.get(key, list(default))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 1 << 31:
            raise ModelError(f"{where}: {key} is {shown(value)}; a token id below 2**31 or a list of such was expected")
    return tuple(dict.fromkeys(ids))
