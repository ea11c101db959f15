"""Reports as bars: a group for each report, a bar for each side, and the floor across each group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.report import Report
from distmk.errors import UsageError

WIDTH = 0.8  # width of a group


def load_pyplot() -> Any:
    """matplotlib's pyplot, which draws only into files. UsageError: it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("a plot needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Save the figure and close it. UsageError: it cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
    finally:
        load_pyplot().close(figure)


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write a PNG. Bars are medians; whiskers are the fastest and the slowest repeat. UsageError: it cannot be written."""
    pyplot = load_pyplot()
    names = list(dict.fromkeys(row.name for report in reports for row in report.rows))
    colors = dict(zip(names, pyplot.get_cmap("tab10").colors * 2, strict=False))
    figure, axes = pyplot.subplots(figsize=(3 + 2.4 * len(reports), 4.8), layout="constrained")
    for place, report in enumerate(reports):
        bar = WIDTH / len(report.rows)
        for index, row in enumerate(report.rows):
            x = place - WIDTH / 2 + bar * (index + 0.5)
            median, most = row.median_ms, max(row.times_ms)
            spread = [[median - min(row.times_ms)], [most - median]]
            axes.bar(x, median, bar * 0.92, yerr=spread, capsize=2, color=colors[row.name])
            axes.annotate(f"{median:.2f}", (x, most), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        if report.floor_ms is not None:
            axes.hlines(report.floor_ms, place - WIDTH / 2, place + WIDTH / 2, colors="black", linestyles="--")
    same_hardware = len({report.hardware for report in reports}) == 1
    ticks = [
        f"{report.num_ranks} x {report.backend if same_hardware else report.hardware}, batch {report.batch}"
        for report in reports
    ]
    axes.set_xticks(range(len(reports)), ticks)
    axes.set_ylabel("ms a decode step")
    first = reports[0]
    axes.set_title(f"{first.model}, context {first.context}{f', {first.hardware}' if same_hardware else ''}")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    labels = list(names)
    if any(report.floor_ms is not None for report in reports):
        handles.append(pyplot.Line2D([], [], color="black", linestyle="--"))
        labels.append("weights and cache at memory bandwidth")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, 1 + len(reports)), fontsize=8)
    save_figure(figure, path)
