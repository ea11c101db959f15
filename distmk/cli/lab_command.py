"""`distmk lab`: measure what kernel launches cost on this GPU, and what each way to avoid them saves.

The lab itself is examples/launch_lab, which imports distmk. Only this module imports the lab.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import distmk
from distmk.errors import UsageError

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
    sys.path.insert(0, str(lab_folder()))
    from lab.command import advise, measure

    if arguments.advise:
        count = DEFAULT_COUNT if arguments.count is None else arguments.count
        duration_us = DEFAULT_US if arguments.duration_us is None else arguments.duration_us
        return advise(arguments.out, count, duration_us, varying=arguments.shapes == "varying")
    for name in ("count", "duration_us", "shapes"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --advise; give that too")
    if arguments.gpu < 0:
        raise UsageError(f"--gpu {arguments.gpu}: GPUs are counted from 0")
    return measure(arguments.out, arguments.gpu)


def lab_folder() -> Path:
    """Folder of the package `lab`: examples/launch_lab in a clone, distmk/_launch_lab in an installed wheel.

    UsageError: neither exists.
    """
    package = Path(distmk.__file__).parent
    for folder in (package.parent / "examples" / "launch_lab", package / "_launch_lab"):
        if (folder / "lab" / "__init__.py").exists():
            return folder
    raise UsageError("the launch lab (examples/launch_lab) is not installed with this package; reinstall distmk")
