"""What ranks send each other: JSON and packed bytes, which are checked on arrival. Nothing that arrives is executed."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from distmk.bootstrap.base import Bootstrap
from distmk.errors import DistmkError


def gather_json(bootstrap: Bootstrap, value: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective. DistmkError: a rank sent something else than JSON."""
    parts = bootstrap.allgather(json.dumps(value).encode())
    return [parse_json(part, f"rank {rank}") for rank, part in enumerate(parts)]


def parse_json(payload: bytes, sender: str) -> Any:
    """The value in `payload`. DistmkError: it is none."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise malformed(sender, "no JSON") from None


def malformed(sender: str, found: str) -> DistmkError:
    """The error for a message that this version of distmk does not send."""
    return DistmkError(f"{sender} sent {found}; do all ranks run the same version of distmk?")


def pack(parts: Sequence[bytes]) -> bytes:
    """Join byte strings into one; `unpack` splits it again."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(data: bytes, sender: str = "rank 0") -> list[bytes]:
    """Undo `pack`. DistmkError: `data` is not what `pack` makes."""
    parts = []
    offset = 0
    while offset < len(data):
        if len(data) - offset < 8:
            raise malformed(sender, "a cut message")
        (size,) = struct.unpack_from("<Q", data, offset)
        offset += 8
        if size > len(data) - offset:
            raise malformed(sender, "a cut message")
        parts.append(data[offset : offset + size])
        offset += size
    return parts
