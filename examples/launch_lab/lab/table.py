"""A report as tables, in plain text or Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.results import CHAIN_RUNGS, PUBLISHED, PUBLISHED_US, TITLES, ChainTime, LabReport, Schedule


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Aligned columns, the first two to the left, the others to the right."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)
            )
            for pairs in ([*zip(row, widths, strict=True)] for row in [self.head, *self.rows])
        ]
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self) -> str:
        rule = ["---"] * 2 + ["---:"] * (len(self.head) - 2)
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.head, rule[: len(self.head)], *self.rows])


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits, or all digits before the point if they are more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def chain_table(report: LabReport) -> Table:
    """Time per kernel of every rung at every size; overhead, gap and preparation at the second size. All in us."""
    num_kernels, sizes = int(report.settings["num_kernels"]), report.sizes
    reference = sizes[min(1, len(sizes) - 1)] if sizes else 0
    pure = report.pure_us(reference)
    head = ["rung", "us a kernel, where it runs for", *(number(report.pure_us(size)) for size in sizes)]
    head += [f"adds to {number(pure)}", "gap", "to prepare"]
    rows = []
    for rung in CHAIN_RUNGS:
        times = [report.at(rung, size, num_kernels) for size in sizes]
        if any(times):
            at = report.at(rung, reference, num_kernels)
            cells = [number(each.kernel_us.median) if each else "-" for each in times]
            rows.append([rung, TITLES[rung], *cells, *_costs(at, pure)])
    return Table(head, rows)


def _costs(at: ChainTime | None, pure: float | None) -> list[str]:
    if at is None:
        return ["-"] * 3
    adds = None if pure is None else at.kernel_us.median - pure
    return [number(adds), number(at.gap_us), number(at.prepare_us)]


def other_lines(report: LabReport) -> dict[str, str]:
    """The results of rungs 8 to 11, one line each, by rung."""
    found = {}
    if queue := report.queue:
        gain = queue.static.total_us.median / queue.queue.total_us.median
        workers = "blocks" if queue.where == "gpu" else "threads"
        found["8"] = (
            f"{sum(queue.queue.num_items)} uneven items, {len(queue.queue.busy_us)} {workers}: "
            f"in turn {number(queue.static.total_us.median)} us, by the counter {number(queue.queue.total_us.median)} us "
            f"({gain:.2f}x as fast); the busiest of the {workers} {imbalance(queue.static):.2f} and "
            f"{imbalance(queue.queue):.2f} times the mean"
        )
    if gemm := report.gemm:
        flops = 2.0 * gemm.m * gemm.n * gemm.k
        ways = [
            f"{name} {number(each.median)} us ({flops / each.median / 1e6:.0f} TFLOP/s)"
            for name, each in gemm.us.items()
        ]
        found["9"] = f"{gemm.m} x {gemm.k} by {gemm.k} x {gemm.n}, bf16: {', '.join(ways)}"
    if drain := report.drain:
        found["10"] = (
            f"{drain.num_items} items in {drain.num_bursts} bursts: a launch a burst {number(drain.burst_us.median)} us, "
            f"draining {number(drain.drain_us.median)} us with {drain.num_launches.median:.0f} launches"
        )
    if resident := report.resident:
        ways = [
            f"{name} {number(way.spread.median)} us (p99 {number(way.spread.p99)}, {number(way.watts)} W)"
            for name, way in resident.ways.items()
        ]
        found["11"] = (
            f"submission to done: {', '.join(ways)}; idle {number(resident.idle_watts)} W; power at "
            f"{resident.submissions_per_s:.0f} submissions a second"
        )
    return found


def imbalance(schedule: Schedule) -> float:
    """Largest busy time of a worker over the mean."""
    return max(schedule.busy_us) / statistics.mean(schedule.busy_us)


def published_table(report: LabReport) -> Table | None:
    """The published figures beside this report's at the nearest duration; None without a GPU."""
    known = [(abs(pure - PUBLISHED_US), size, pure) for size in report.sizes if (pure := report.pure_us(size))]
    if not known or not report.on_gpu:
        return None
    _, size, pure = min(known)
    rows = []
    for rung, name in (("1", "naive"), ("3", "graph"), ("4", "fused"), ("7", "mega: cooperative")):
        rows.append([rung, name, f"{PUBLISHED[rung]}", _median(report, rung, size)])
    rows += [[rung, f"mega: {TITLES[rung]}", "", _median(report, rung, size)] for rung in ("6", "12")]
    naive = report.at("1", size, int(report.settings["num_kernels"]))
    overhead = number(naive.kernel_us.median - pure) if naive else "-"
    rows.append(["", "launch overhead", f"{PUBLISHED['overhead']}", overhead])
    return Table(
        ["rung", "us a kernel", f"published, {PUBLISHED['gpu']}", f"here, a kernel of {number(pure)} us"], rows
    )


def _median(report: LabReport, rung: str, size: int) -> str:
    found = report.at(rung, size, int(report.settings["num_kernels"]))
    return number(found.kernel_us.median) if found else "-"


def heading(report: LabReport) -> str:
    """The hardware and the step that was measured."""
    machine, settings = report.machine, report.settings
    if not report.on_gpu:
        where = f"no GPU; the host twin on {machine['cores']} cores of {machine['cpu']}"
    else:
        where = f"{machine['gpu']}, {machine['num_sms']} SMs, driver {machine['driver']}, nvcc {machine['nvcc']}"
    return f"{where}; a step is {settings['num_kernels']} kernels of {settings['num_sines']} sines an element"


def text(report: LabReport) -> str:
    """The whole report as `distmk lab` prints it."""
    parts = [heading(report), chain_table(report).text()]
    parts.append("\n".join(f"{rung:<4}  {TITLES[rung]}: {line}" for rung, line in other_lines(report).items()))
    if published := published_table(report):
        parts.append(published.text())
    if report.on_gpu:
        parts += notes("left out", report.left_out)
    parts += notes("FAILED", report.failed)
    return "\n\n".join(filter(None, parts))


def notes(what: str, rungs: dict[str, str]) -> Sequence[str]:
    """A paragraph with one line for each of `rungs`; no paragraph if there are none. `what`: what happened to them."""
    lines = [f"{what}: rung {rung}, {TITLES[rung]}: {reason}" for rung, reason in rungs.items()]
    return ["\n".join(lines)] if lines else []
