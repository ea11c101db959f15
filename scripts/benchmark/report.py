"""The result of a comparison: one JSON object, and a table of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distmk.errors import UsageError


def latency_summary(times: Sequence[float], digits: int) -> dict[str, float]:
    """Median and 99th percentile, rounded."""
    return {
        "median": round(statistics.median(times), digits),
        "p99": round(sorted(times)[int(0.99 * len(times))], digits),
    }


@dataclass
class Row:
    """One side of the comparison. `agreement`: of its tokens with distmk's, in words."""

    name: str
    times_ms: list[float]
    steps: int
    agreement: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


@dataclass
class Report:
    """`floor_ms`: the time that the bytes of a step take at the measured bandwidth; None if that was not measured."""

    model: str
    num_layers: int
    num_ranks: int
    backend: str
    batch: int
    context: int
    tokens: int
    step_bytes: int
    bandwidth: dict[str, float]
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def floor_ms(self) -> float | None:
        best = max(self.bandwidth.values(), default=0.0)
        return 1e3 * self.step_bytes / best if best else None

    @property
    def hardware(self) -> str:
        return str(self.machine.get("gpu", self.machine.get("cpu", "")))

    def save(self, path: Path) -> None:
        """Write the report to a file. UsageError: it cannot be written."""
        rows = [asdict(row) | {"median_ms": row.median_ms} for row in self.rows]
        content = asdict(self) | {"floor_ms": self.floor_ms, "rows": rows}
        try:
            path.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    @staticmethod
    def load(path: Path) -> Report:
        """Read a report. UsageError: it is not a file that `save` has written."""
        try:
            content = json.loads(path.read_text())
            content.pop("floor_ms")
            content["rows"] = [Row(**{k: v for k, v in row.items() if k != "median_ms"}) for row in content["rows"]]
            return Report(**content)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(f"{path} is no report; give a file that `bench.py step --json` wrote") from None

    def text(self) -> str:
        """The report as text."""
        lines = [
            f"{self.model}, {self.num_layers} layers, {self.backend} x {self.num_ranks}, batch {self.batch}, "
            f"{self.tokens} tokens from a context of {self.context}",
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
        ]
        if self.floor_ms is not None:
            speeds = ", ".join(f"{value / 1e12:.2f} TB/s with {name}" for name, value in self.bandwidth.items())
            lines.append(f"memory is read at {speeds}")
            lines.append(
                f"a rank reads {self.step_bytes / 1e9:.3f} GB a step: {self.floor_ms:.3f} ms at the best of these"
            )
        return "\n".join([*lines, "", *self._table(), *self.notes])

    def _table(self) -> list[str]:
        ours = self.rows[0].median_ms
        cells = [["", "ms a step", "min", "max", "steps", "of the floor", "of distmk's", "tokens as distmk's"]]
        for row in self.rows:
            share = f"{self.floor_ms / row.median_ms:.0%}" if self.floor_ms is not None else "-"
            times = [f"{value:.3f}" for value in (row.median_ms, min(row.times_ms), max(row.times_ms))]
            ratio = f"{row.median_ms / ours:.2f}x" if row is not self.rows[0] else ""
            cells.append([row.name, *times, f"{len(row.times_ms)} x {row.steps}", share, ratio, row.agreement])
        return _aligned(cells)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
