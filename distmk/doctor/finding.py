"""The result of one check of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "missing", "unneeded"]


@dataclass(frozen=True)
class Finding:
    """`text` says what was found and, if `state` is warn or missing, what to do; `details` are lines below it.

    `backend`: the backend that cannot run if `state` is missing; None: both can.
    """

    name: str
    state: State
    text: str
    backend: Literal["host", "cuda"] | None = None
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.state:<8} {self.name:<14} {self.text}", *(" " * 24 + line for line in self.details)])


def first_line(text: str, default: str = "") -> str:
    """The first line of a message, for a finding of one line."""
    return (text.splitlines() or [default])[0].strip()
