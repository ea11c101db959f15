#!/usr/bin/env python3
"""Measure distmk beside its peers.

    python scripts/bench.py host MODEL.gguf                                # the host twin and transformers, memory, compiling
    python scripts/bench.py step qwen3-8b --plot step.png                  # a decode step: one GPU
    torchrun --nproc-per-node 4 scripts/bench.py step qwen3-8b             # or mpirun -n 4 python scripts/bench.py step ...
    python scripts/bench.py hops                                           # the runtime's own latencies, on as many ranks
    python scripts/bench.py plot 1.json 2.json 4.json --output step.png    # reports that step wrote with --json
    python scripts/bench.py growth *.json --output growth.png              # of several layers, ranks and batches

Figures of `host` and `step` are medians of --repeats runs (default 5), with the spread. Each part explains itself with
--help.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmark import hops, host, step
from benchmark.growth import draw_growth
from benchmark.machine import NO_MULTICAST
from benchmark.plot import draw
from benchmark.report import Report

from distmk.cli.exit_status import run_main


def run_drawing(arguments: argparse.Namespace) -> int:
    arguments.draw([Report.load(path) for path in arguments.reports], arguments.output)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(required=True, metavar="PART")
    for name, module in (("host", host), ("step", step), ("hops", hops)):
        part = parts.add_parser(name, help=(module.__doc__ or "").partition("\n")[0], description=module.__doc__)
        module.add_arguments(part)
        part.set_defaults(run=module.run)
    drawings = {
        "plot": (draw, "Draw reports of `step`."),
        "growth": (
            draw_growth,
            "Draw how a step of distmk grows with layers, ranks and batch, from reports of `step`.",
        ),
    }
    for name, (function, text) in drawings.items():
        part = parts.add_parser(name, help=text, description=text)
        part.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
        part.add_argument("--output", type=Path, required=True, metavar="FILE.png")
        part.set_defaults(run=run_drawing, draw=function)
    return parser.parse_args()


def main() -> int:
    os.environ.update(NO_MULTICAST)  # before any library reads the environment
    arguments = parse()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    run_main(main)
