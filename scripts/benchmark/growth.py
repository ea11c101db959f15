"""How a decode step of distmk grows with layers, ranks and batch, beside the time that its bytes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.plot import load_pyplot, save_figure
from benchmark.report import Report
from distmk.errors import UsageError

Field = Callable[[Report], int]
OF: dict[str, Field] = {
    "layers": lambda report: report.num_layers,
    "ranks": lambda report: report.num_ranks,
    "batch": lambda report: report.batch,
}


def series(reports: Sequence[Report], name: str) -> dict[str, list[Report]]:
    """Groups of several reports that differ only in `name`, sorted by it; the keys say what the reports share."""
    others = [other for other in OF if other != name]
    by_label: dict[str, dict[int, Report]] = {}
    for report in reports:
        label = ", ".join(f"{other} {OF[other](report)}" for other in others)
        by_label.setdefault(label, {})[OF[name](report)] = report
    return {label: [each[at] for at in sorted(each)] for label, each in by_label.items() if len(each) > 1}


def draw_growth(reports: Sequence[Report], path: Path) -> None:
    """Write a PNG with a panel each for layers, ranks and batch: solid lines are measurements, dashed lines the floor.

    UsageError: the reports are of different models, lengths or backends, no two differ in only one of the three, or the
    file cannot be written.
    """
    alike = {(each.model, each.context, each.tokens, each.backend) for each in reports}
    if len(alike) > 1:
        raise UsageError(f"reports of different models, lengths or backends: {sorted(alike)}; give some that agree")
    panels = {name: series(reports, name) for name in OF}
    if not any(panels.values()):
        raise UsageError("no two reports differ in layers, ranks or batch alone; nothing can be seen to grow")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.8), layout="constrained")
    for panel, (name, lines) in zip(axes, panels.items(), strict=True):
        for label, line in lines.items():
            _draw_line(panel, [OF[name](report) for report in line], line, label)
        panel.set_xlabel(name)
        panel.set_ylim(bottom=0)
        if lines:
            panel.legend(fontsize=8)
    axes[0].set_ylabel("ms a decode step")
    first = reports[0]
    figure.suptitle(f"{first.model}, context {first.context}, {first.hardware}; dashed: the bytes at memory bandwidth")
    save_figure(figure, path)


def _draw_line(panel: Any, at: list[int], line: list[Report], label: str) -> None:
    times = [report.rows[0].median_ms for report in line]
    color = panel.plot(at, times, marker="o", label=label)[0].get_color()
    for x, ms in zip(at, times, strict=True):
        panel.annotate(f"{ms:.2f}", (x, ms), (0, 5), textcoords="offset points", ha="center", fontsize=7)
    floors = [report.floor_ms for report in line]
    if None not in floors:
        panel.plot(at, floors, color=color, linestyle="--")
