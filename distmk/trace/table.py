"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """`title`, `head` and `lines` in columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([f"  {first}", *others]).rstrip()

    return "\n".join([title, aligned(head), *map(aligned, lines)]) + "\n"


def us(value: float) -> str:
    """Microseconds."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
