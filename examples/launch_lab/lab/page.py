"""Writes the measured parts of examples/launch_lab/README.md between its markers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from distmk.errors import UsageError
from lab.advise import advise, fixed
from lab.plots import BALANCE, CHAIN, LATENCY
from lab.results import CHAIN_RUNGS, TITLES, LabReport
from lab.table import chain_table, heading, number, other_lines, published_table

COUNTS = (1, 5, 20, 100, 1000)
MARKED = re.compile(r"(<!-- lab:(\w+) -->\n).*?(<!-- /lab -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet."


def write(report: LabReport, measured: Path, page: Path) -> None:
    """Fill `page` from a report, and copy the plots in the folder `measured` beside it.

    UsageError: the report is not of a GPU, a marker is absent, or a file cannot be read or written.
    """
    if not report.on_gpu:
        raise UsageError(f"{measured}/lab.json was written without a GPU; the page needs one")
    try:
        for name in (CHAIN, LATENCY, BALANCE):
            if (measured / name).exists():
                shutil.copyfile(measured / name, page.parent / name)
        page.write_text(filled(page.read_text(), parts(report)))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read or written: {error.strerror or error}") from None


def filled(text: str, by_name: dict[str, str]) -> str:
    """`text` with every marked part replaced: by `by_name`, or by a note that it was not measured.

    UsageError: a part of `by_name` has no marker.
    """
    names = [name for _, name, _ in MARKED.findall(text)]
    if missing := set(by_name) - set(names):
        raise UsageError(f"the page has no marker for {', '.join(sorted(missing))}; expected <!-- lab:NAME -->")
    return MARKED.sub(lambda found: f"{found[1]}{by_name.get(found[2], NOT_MEASURED)}\n{found[3]}", text)


def parts(report: LabReport) -> dict[str, str]:
    """The Markdown of each marker."""
    published = published_table(report)
    found = {
        "machine": f"{heading(report)}. Medians; {report.seconds:.0f} s for all of it, every result checked.",
        "chain": f"{chain_table(report).markdown()}\n\n![us a kernel against its duration]({CHAIN})",
        "published": published.markdown() if published else NOT_MEASURED,
        "advice": _advice(report),
    }
    for rung in CHAIN_RUNGS:
        if rung != "7f":
            found[f"rung{rung}"] = _costs(report, rung)
    plots = {"8": f"\n\n![busy time of every block]({BALANCE})", "11": f"\n\n![submit to done]({LATENCY})"}
    for rung in ("8", "9", "10", "11"):
        line = other_lines(report).get(rung)
        found[f"rung{rung}"] = f"Measured: {line}.{plots.get(rung, '')}" if line else _why_not(report, rung)
    return found


def _costs(report: LabReport, rung: str) -> str:
    """A table of the costs of a rung, in us: for the shortest, a middle and the longest kernel, and for a step."""
    num_kernels = int(report.settings["num_kernels"])
    added = []
    for size in report.sizes:
        pure, found = report.pure_us(size), report.at(rung, size, num_kernels)
        if pure is not None and found:
            added.append((f"adds to a kernel of {number(pure)}", f"{found.kernel_us.median - pure:+.2f}"))
    if not added:
        return _why_not(report, rung)
    middle = [added[len(added) // 2]] if len(added) > 2 else []
    costs = [added[0], *middle, *added[-1:]] if len(added) > 1 else added
    first = next(each for each in report.chain if each.rung == rung)
    if first.gap_us is not None:
        what = "from a task's last input to its start" if rung == "12" else "between two kernels or phases"
        costs.append((what, number(first.gap_us)))
    costs.append(("to prepare for new shapes", number(first.prepare_us)))
    if rung == "12":
        costs.append(("once a launch", number(first.start_us)))
    else:
        costs.append(("of a step, whatever its kernels", number(fixed(report, rung))))
    lines = [
        ("measured, us", *(what for what, _ in costs)),
        ("---", *("---:" for _ in costs)),
        ("", *(us for _, us in costs)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _why_not(report: LabReport, rung: str) -> str:
    reason = report.failed.get(rung) or report.left_out.get(rung)
    return f"Not measured: {reason}." if reason else NOT_MEASURED


def _advice(report: LabReport) -> str:
    """Tables of the chosen rung by duration and number of kernels.

    In brackets, if it differs: the choice if each element depends on itself alone.
    """
    durations = [float(each) for each in report.settings["targets_us"]]
    tables = []
    for shapes in ("fixed", "varying"):
        rows = []
        for count in COUNTS:
            cells = []
            for duration in durations:
                found = advise(report, count, duration, shapes == "varying")
                any_reads, own = TITLES[found.any_reads.rung], found.own_reads.rung
                cells.append(any_reads + (f" ({TITLES[own]})" if own != found.any_reads.rung else ""))
            rows.append(f"| {count} | {' | '.join(cells)} |")
        head = " | ".join(f"{number(each)} us" for each in durations)
        rule = "|".join(["---"] * (len(durations) + 1))
        tables.append(f"Shapes {shapes}:\n\n| kernels a step | {head} |\n|{rule}|\n" + "\n".join(rows))
    return "\n\n".join(tables)
