"""A report as plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from distmk.errors import UsageError
from lab.results import CHAIN_RUNGS, TITLES, LabReport
from lab.table import heading, number

CHAIN, LATENCY, BALANCE = "chain.png", "latency.png", "balance.png"


def draw(report: LabReport, folder: Path) -> list[Path]:
    """Draw the plots for which there are measurements, and return the paths of the PNGs.

    UsageError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    made = []
    for name, wanted, fill in (
        (CHAIN, report.on_gpu and report.chain, _chain),
        (LATENCY, report.resident, _latency),
        (BALANCE, report.queue, _balance),
    ):
        if wanted:
            made.append(_save(report, folder / name, fill))
    return made


def _save(report: LabReport, path: Path, fill: Any) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    try:
        fill(report, axes)
        figure.suptitle(heading(report).split(";")[0], fontsize=8)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
    return path


def _chain(report: LabReport, axes: Any) -> None:
    """Time per kernel against the duration of a plain kernel alone, log-log, in us."""
    num_kernels = int(report.settings["num_kernels"])
    for rung, marker in zip(CHAIN_RUNGS, "osD^vPXd*", strict=True):
        points = [
            (pure, found.kernel_us)
            for size in report.sizes
            if (pure := report.pure_us(size)) and (found := report.at(rung, size, num_kernels))
        ]
        if points:
            pures, spreads = [pure for pure, _ in points], [spread for _, spread in points]
            (line,) = axes.plot(pures, [each.median for each in spreads], marker=marker, ms=5, lw=1.2)
            line.set_label(f"{rung} {TITLES[rung]}")
            axes.fill_between(
                pures, [s.p25 for s in spreads], [s.p75 for s in spreads], color=line.get_color(), alpha=0.2
            )
    ends = [pure for size in report.sizes if (pure := report.pure_us(size))]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], "k--", lw=0.8, label="the kernel alone")
    axes.set(xscale="log", yscale="log", xlabel="a plain kernel alone, us", ylabel="a kernel's share of a step, us")
    axes.set_title(f"Steps of {num_kernels} kernels: what is beside the kernels themselves")
    axes.grid(which="both", lw=0.3)
    axes.legend(fontsize=8)


def _latency(report: LabReport, axes: Any) -> None:
    """Cumulative distribution of the submission latency in us."""
    assert report.resident is not None
    for name, way in report.resident.ways.items():
        latencies = np.sort(way.us)
        power = f", {number(way.watts)} W" if way.watts is not None else ""
        label = f"{name}: median {number(way.spread.median)} us, p99 {number(way.spread.p99)} us{power}"
        axes.plot(latencies, 100 * np.arange(1, len(latencies) + 1) / len(latencies), lw=1.4, label=label)
    idle = report.resident.idle_watts
    axes.set(xscale="log", xlabel="from submission to done, us", ylabel="% of submissions")
    axes.set_title("Rung 11: submit to done" + (f" (board idle: {number(idle)} W)" if idle is not None else ""))
    axes.grid(which="both", lw=0.3)
    axes.legend(fontsize=8)


def _balance(report: LabReport, axes: Any) -> None:
    """Busy time of every worker in us, in descending order."""
    assert report.queue is not None
    workers = "blocks" if report.queue.where == "gpu" else "threads"
    for name, schedule in (("dealt out in turn", report.queue.static), ("taken from a counter", report.queue.queue)):
        busy = np.sort(schedule.busy_us)[::-1]
        label = f"{name}: all done after {number(schedule.total_us.median)} us"
        axes.step(np.arange(len(busy)), busy, where="mid", lw=1.4, label=label)
    axes.set(xlabel=f"{workers}, the busiest first", ylabel="busy, us", ylim=(0, None))
    axes.set_title(
        f"Rung 8: {sum(report.queue.queue.num_items)} uneven items on {len(report.queue.queue.busy_us)} {workers}"
    )
    axes.grid(lw=0.3)
    axes.legend(fontsize=8)
