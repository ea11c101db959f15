"""Conversations for a process that renders chat templates, as its tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from distmk.text.processes.frames import Limits


@dataclass(frozen=True)
class Task:
    """A conversation to be rendered by the template `source`; plain values, as JSON has them."""

    source: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    limits: Limits

    def encode(self) -> bytes:
        """ValueError: a number has more digits than Python writes."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @staticmethod
    def decode(payload: bytes) -> Task:
        """Undo `encode`."""
        fields = json.loads(payload.decode("utf-8", "surrogatepass"))
        return Task(**{**fields, "limits": Limits(**fields["limits"])})
