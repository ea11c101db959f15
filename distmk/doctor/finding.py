"""What a check of this machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Finding:
    """`text` says what was found and, unless all is well, what to do; `details` are lines below it.

    `backend` is the one that cannot run while this is missing, if any.
    """

    name: str
    state: State
    text: str
    backend: Literal["host", "cuda"] | None = None
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.state:<8} {self.name:<14} {self.text}", *(" " * 24 + line for line in self.details)])
