"""What `distmk lab` does: measure and write a report, or apply a written report to a step of kernels.

The arguments are parsed in distmk/cli/lab_command.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from distmk.console import show, tell
from distmk.errors import UsageError
from lab import plots, table
from lab.advise import advise as advise_from
from lab.advise import lines
from lab.gpu import why_no_gpu
from lab.results import LabReport
from lab.run import run_gpu, run_host


def measure(folder: Path, gpu: int) -> int:
    """Run the rungs on GPU `gpu`, or on the host if there is no GPU. Print a table; write lab.json and plots to `folder`.

    Returns the exit status: 1 if a rung failed. UsageError: `folder` cannot be written, or there is no such GPU.
    """
    _check_writable(folder)
    report = _report(gpu)
    show(table.text(report))
    report.save(folder)
    written = "lab.json and the plots"
    try:
        plots.draw(report, folder)
    except UsageError as error:
        written = "lab.json"
        tell(f"no plots: {error}")
    tell(f"lab: {folder} has {written}, after {report.seconds:.0f} s")
    return 1 if report.failed else 0


def advise(folder: Path, count: int, duration_us: float, varying: bool) -> int:
    """Print which rung suits steps of `count` kernels of `duration_us` us, from the lab.json in `folder`.

    `varying`: shapes change from step to step. Returns the exit status. UsageError: no usable lab.json, or an impossible step.
    """
    report = LabReport.load(folder)
    found = advise_from(report, count, duration_us, varying)
    show("\n".join(lines(report, found, count, duration_us, varying)))
    return 0


def _report(gpu: int) -> LabReport:
    if missing := why_no_gpu():
        tell(f"lab: {missing}; rungs 8 and 12 run on the host, the others need a GPU")
        return run_host(missing)
    return run_gpu(gpu, tell)


def _check_writable(folder: Path) -> None:
    """UsageError before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror or error}; name another folder") from None
