"""`distmk check`: compile a model for any number of ranks and workers, and prove the program. Needs no weights."""

from __future__ import annotations

import argparse
import time
from typing import Any

from distmk import env
from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS
from distmk.backends.defaults import choose_model_len
from distmk.check import Verdict, check_with_progress
from distmk.cli.model_options import add_model_options
from distmk.console import show
from distmk.errors import CheckError, shown
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.messages import messages_by_op
from distmk.program.program import Program, compile_graph
from distmk.progress import progress
from distmk.trace.record import family_of
from distmk.weights import open_checkpoint


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="compile a model and prove its program",
        description="Compile a model for N ranks and prove that every wait is met, nothing deadlocks, every "
        "conflicting access is ordered and every operand is in bounds. Needs the config only; nothing is run. Exit status "
        "3: the program is not correct.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--host-sizes",
        type=_sizes,
        default=(),
        metavar="N,N,...",
        help="numbers of ranks on each of several hosts, in rank order (default: all ranks on one host)",
    )
    parser.set_defaults(run=run)


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers of a list with commas. ArgumentTypeError: it is not such a list."""
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no list of numbers; give, for example, 2,2") from None


def _messages(program: Program) -> str:
    by_op: dict[str, int] = {}
    for op, count in messages_by_op(program).items():
        by_op[family_of(op)] = by_op.get(family_of(op), 0) + count
    each = ", ".join(f"{op} {count}" for op, count in by_op.items())
    return f"between hosts, an iteration: {sum(by_op.values())} ({each})"


def run(arguments: argparse.Namespace) -> int:
    config = open_checkpoint(arguments.model, "dummy", revision=arguments.revision).config
    options = DecodeOptions(
        num_ranks=1 if arguments.ranks is None else arguments.ranks,
        num_workers=1 if arguments.workers is None else arguments.workers,
        max_seqs=MAX_ROWS if arguments.max_num_seqs is None else arguments.max_num_seqs,
        max_model_len=choose_model_len(arguments.max_model_len, config),
        host_sizes=arguments.host_sizes,
        row_buckets=env.row_buckets()
        or ((MAX_ROWS,) if len(arguments.host_sizes) > 1 else (MAX_ROWS, MAX_BUCKET_ROWS)),
    )
    started = time.perf_counter()
    with progress("compiling the program"):
        program = compile_graph(*lower_programs(build_model(config), options))
    compiled = time.perf_counter()
    show(f"ranks     {options.num_ranks} x {options.num_workers} workers")
    for rank, part in enumerate(program.ranks):
        header = part.header
        show(
            f"rank {rank:<4} {header.num_tasks} tasks, {header.num_events} events, {header.num_waits} waits, "
            f"{part.weight_bytes / 1e6:.1f} MB of weights streamed a step, "
            f"{header.local_bytes / 1e6:.0f} MB of its own memory"
        )
    for rows, other in zip(options.row_buckets[1:], program.others, strict=True):
        header = other.ranks[0].header
        show(
            f"program   iterations of up to {rows} tokens: {header.num_tasks} tasks, {header.num_events} events, "
            f"{header.num_waits} waits on rank 0"
        )
    heap_bytes = program.placement.heap_bytes
    show(f"buffers   {len(program.placement.buffers)}, symmetric heap {heap_bytes / 1e6:.2f} MB a rank")
    if options.crosses_hosts:
        show(f"messages  {_messages(program)}")
    show(f"compiled  in {compiled - started:.1f} s")
    try:
        verdict = check_with_progress(program)
    except CheckError:
        show("verdict   not correct: it would not be run")
        raise
    show(f"verdict   correct, proved in {time.perf_counter() - compiled:.1f} s: {_proved(verdict)}")
    return 0


def _proved(verdict: Verdict) -> str:
    return (
        f"each of {verdict.num_waits} waits is met by its triggers, nothing deadlocks,\n"
        f"          all {verdict.num_ordered_pairs} pairs of conflicting accesses are ordered, "
        f"every operand of {verdict.num_tasks} tasks is in bounds"
    )
