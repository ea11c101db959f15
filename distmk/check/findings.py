"""What is wrong with a program, one line a fault, and how faults name things."""

from __future__ import annotations

from distmk.errors import CheckError

MAX_LISTED = 10


class Findings:
    """Collects faults; keeps the first few and counts the rest."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.count = 0

    @property
    def full(self) -> bool:
        """More need not be looked for: enough are known to be listed."""
        return len(self.lines) >= MAX_LISTED

    def add(self, kind: str, text: str) -> None:
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


def name_at(names: list[str], index: int, word: str) -> str:
    """`names[index]`, or the bare index where the list of names is short."""
    return names[index] if 0 <= index < len(names) else f"{word} {index}"
