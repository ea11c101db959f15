"""`distmk lab`: measure what launching kernels costs on this GPU, and what each way out of it brings."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from distmk.console import tell
from distmk.errors import UsageError
from distmk.lab import advise, plots, table
from distmk.lab.gpu import why_no_gpu
from distmk.lab.results import LabReport

DEFAULT_FOLDER = Path("lab")
DEFAULT_COUNT, DEFAULT_US = 20, 5.0


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "lab",
        help="measure what launching kernels costs, and the ways out",
        description="Run the rungs of examples/launch_lab, check their results, and write a table to stdout, lab.json and "
        "plots to DIR. Without a GPU, what can run on the host. --advise says which rung suits a step of kernels.",
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="which of the visible GPUs (default 0)")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="default: lab")
    parser.add_argument(
        "--advise", action="store_true", help="measure nothing; apply DIR/lab.json to a step of kernels"
    )
    parser.add_argument("--count", type=int, metavar="N", help=f"kernels a step (default {DEFAULT_COUNT})")
    parser.add_argument("--duration-us", type=float, metavar="D", help=f"of a kernel alone (default {DEFAULT_US:g})")
    parser.add_argument("--shapes", choices=("fixed", "varying"), help="from step to step (default fixed)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.advise:
        return _advise(arguments)
    for name in ("count", "duration_us", "shapes"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --advise; give that too")
    if arguments.gpu < 0:
        raise UsageError(f"--gpu {arguments.gpu}: GPUs are counted from 0")
    _check_writable(arguments.out)
    report = _measure(arguments.gpu)
    print(table.text(report), flush=True)
    report.save(arguments.out)
    written = "lab.json and the plots"
    try:
        plots.draw(report, arguments.out)
    except UsageError as error:
        written = "lab.json"
        tell(f"no plots: {error}")
    tell(f"lab: {arguments.out} has {written}, after {report.seconds:.0f} s")
    return 1 if report.failed else 0


def _measure(gpu: int) -> LabReport:
    from distmk.lab.run import run_gpu, run_host

    if missing := why_no_gpu():
        tell(f"lab: {missing}; rungs 8 and 12 run on the host, the others need a GPU")
        return run_host(missing)
    return run_gpu(gpu, tell)


def _advise(arguments: argparse.Namespace) -> int:
    count = DEFAULT_COUNT if arguments.count is None else arguments.count
    duration_us = DEFAULT_US if arguments.duration_us is None else arguments.duration_us
    report, varying = LabReport.load(arguments.out), arguments.shapes == "varying"
    found = advise.advise(report, count, duration_us, varying)
    print("\n".join(advise.lines(report, found, count, duration_us, varying)), flush=True)
    return 0


def _check_writable(folder: Path) -> None:
    """UsageError before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror or error}; name another folder") from None
