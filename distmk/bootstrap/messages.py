"""Messages between ranks: JSON, numbers and packed bytes, checked on arrival. Nothing that arrives is ever executed.

A `shape` describes a JSON value: a type (int, str, bool, float), None, `[shape]` for a list, a tuple of alternatives, a
dict with fixed keys, or `{str: shape}` for a dict with any keys.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Sequence
from typing import Any

from distmk.bootstrap.base import Bootstrap
from distmk.errors import DistmkError

Shape = Any


def to_json(value: Any) -> bytes:
    """`value` as a message. numpy's numbers become plain ones; other objects raise TypeError."""
    return json.dumps(value, default=operator.index).encode()


def from_json(payload: bytes, sender: str, what: str, shape: Shape) -> Any:
    """The value in `payload`. DistmkError, which names `sender` and the expected `what`: it has another shape."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        raise malformed(sender, what) from None
    if not _fits(value, shape):
        raise malformed(sender, what)
    return value


def gather_json(bootstrap: Bootstrap, value: Any, what: str, shape: Shape) -> list[Any]:
    """The values of all ranks, in rank order. Collective. DistmkError on every rank: a rank sent something else."""
    parts = bootstrap.allgather(to_json(value))
    return [from_json(part, f"rank {rank}", what, shape) for rank, part in enumerate(parts)]


def malformed(sender: str, what: str) -> DistmkError:
    """The error to raise for a message that this version of distmk does not send."""
    return DistmkError(f"{sender} sent no valid {what}; start the same version of distmk on every rank")


def pack(parts: Sequence[bytes]) -> bytes:
    """Join byte strings into one; `unpack` splits it again."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(data: bytes, sender: str, count: int) -> list[bytes]:
    """Split a result of `pack` into its `count` parts. DistmkError, which names `sender`: `data` is something else."""
    parts: list[bytes] = []
    offset = 0
    while offset < len(data) and len(parts) < count:
        if len(data) - offset < 8:
            break
        (size,) = struct.unpack_from("<Q", data, offset)
        offset += 8
        parts.append(data[offset : offset + size])
        offset += size
    if offset != len(data) or len(parts) != count:
        raise malformed(sender, "message of several parts")
    return parts


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, tuple):
        return any(_fits(value, alternative) for alternative in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if str in shape:
            return all(_fits(each, shape[str]) for each in value.values())
        return value.keys() == shape.keys() and all(_fits(value[name], each) for name, each in shape.items())
    if shape is float:
        return type(value) in (float, int)
    return value is None if shape is None else type(value) is shape
