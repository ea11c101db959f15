"""`distmk trace`: print the tables of a trace that `distmk generate --trace` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distmk import trace
from distmk.console import show


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="sum up a saved trace",
        description="Print the tables of a trace that generate --trace wrote: time by operator, the way through a layer, "
        "idle time by event, hops.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, .json or .json.gz")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    show(trace.report(trace.read(arguments.file)), end="")
    return 0
