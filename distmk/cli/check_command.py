"""`distmk check`: compile a model for any number of ranks and workers, and prove the program. Needs no weights."""

from __future__ import annotations

import argparse
import time
from typing import Any

from distmk.backends.defaults import choose_model_len
from distmk.check import check
from distmk.cli.generate_command import add_model_options
from distmk.lower import DecodeOptions, lower
from distmk.model.operators import build_model
from distmk.program.program import compile_graph
from distmk.weights import open_checkpoint


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="compile a model and prove its program",
        description="Compile a model for N ranks and prove that every wait is met, nothing deadlocks, every "
        "conflicting access is ordered and every operand is in bounds. Needs the config only; nothing is run.",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = open_checkpoint(arguments.model, "dummy").config
    options = DecodeOptions(
        num_ranks=1 if arguments.ranks is None else arguments.ranks,
        num_workers=1 if arguments.workers is None else arguments.workers,
        max_seqs=arguments.max_num_seqs,
        max_model_len=choose_model_len(arguments.max_model_len, config),
    )
    started = time.perf_counter()
    program = compile_graph(lower(build_model(config), options))
    compiled = time.perf_counter()
    print(f"ranks     {options.num_ranks} x {options.num_workers} workers")
    for rank, part in enumerate(program.ranks):
        header = part.header
        print(
            f"rank {rank:<4} {header.num_tasks} tasks, {header.num_events} events, {header.num_waits} waits, "
            f"{part.weight_bytes / 1e6:.1f} MB of weights streamed a step, "
            f"{header.local_bytes / 1e6:.0f} MB of its own memory"
        )
    heap_bytes = program.placement.heap_bytes
    print(f"buffers   {len(program.placement.buffers)}, symmetric heap {heap_bytes / 1e6:.2f} MB a rank")
    print(f"compiled  in {compiled - started:.1f} s", flush=True)
    verdict = check(program)
    print(f"verdict   proved in {time.perf_counter() - compiled:.1f} s: {verdict}")
    return 0
