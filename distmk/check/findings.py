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
        """Whether as many faults are known as will be listed: a check may stop."""
        return len(self.lines) >= MAX_LISTED

    def add(self, kind: str, text: str) -> None:
        """Record a fault, unless the same line is there already."""
        line = f"{kind}: {text}"
        if line in self.lines:
            return
        self.count += 1
        if not self.full:
            self.lines[line] = None

    def raise_any(self) -> None:
        """CheckError with the faults found so far, if there are any."""
        if not self.count:
            return
        more = self.count - len(self.lines)
        tail = [f"... and {more} more"] if more else []
        raise CheckError("\n".join([f"the program is not correct ({self.count} faults):", *self.lines, *tail]))
