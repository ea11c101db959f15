"""The faults of a program, one line each."""

from __future__ import annotations

from distmk.errors import CheckError

MAX_LISTED = 10


class Findings:
    """Collects faults; keeps the first MAX_LISTED and counts the rest."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether MAX_LISTED faults are known, so that a check may stop."""
        return len(self.lines) >= MAX_LISTED

    def add(self, kind: str, text: str) -> None:
        """Record a fault; the same line is recorded once."""
        line = f"{kind}: {text}"
        if line in self.lines:
            return
        self.count += 1
        if not self.full:
            self.lines[line] = None

    def raise_any(self) -> None:
        """Raise CheckError with the faults found so far, if there are any."""
        if not self.count:
            return
        more = self.count - len(self.lines)
        tail = [f"... and {more} more"] if more else []
        raise CheckError("\n".join([f"the program is not correct ({self.count} faults):", *self.lines, *tail]))
