"""`distmk graph`: a model's operators before and after each compiler pass, and the tasks of its programs. Needs no weights."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS
from distmk.cli.model_options import add_model
from distmk.console import show
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.blocks import blocks_of
from distmk.model.causal_lm import CausalLM
from distmk.model.listing import drawing, listing
from distmk.model.nodes import Node
from distmk.model.operators import Model
from distmk.model.passes import PASSES, run_passes
from distmk.models import model_of
from distmk.weights import open_checkpoint


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "graph",
        help="show a model's operators and tasks",
        description="Print the operators that a model is written in, what each compiler pass makes of them, and the tasks of an "
        "iteration. Needs the config only; nothing is run.",
    )
    add_model(parser)
    parser.add_argument(
        *("--ranks", "-tp", "--tensor-parallel-size"),
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default 1)",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers a rank (default 1)")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="layers to show, the first ones (default 1)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PASS", help=f"leave out a pass; passes are {', '.join(PASSES)}"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the operators before and after all passes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = open_checkpoint(arguments.model, "dummy", revision=arguments.revision).config
    if not 1 <= arguments.layers <= config.num_layers:
        raise UsageError(f"--layers is {arguments.layers}; the model has 1 to {config.num_layers} layers to show")
    model = model_of(config.first_layers(arguments.layers))
    before = model.logits()
    show(f"{type(model).__name__}: {arguments.layers} of {config.num_layers} layers")
    _show_stage("operators", listing(before))
    after = _show_passes(before, arguments.skip)
    if arguments.svg:
        stages = [("operators", before), ("after all passes", after)]
        try:
            arguments.svg.write_text(drawing(stages))
        except OSError as error:
            raise UsageError(f"{arguments.svg}: cannot be written: {error.strerror}") from None
    _show_tasks(model, after, arguments)
    return 0


def _show_passes(output: Node, skip: list[str]) -> Node:
    """Show what each pass changes, and return the output of the last one."""
    shown = listing(output)
    for name, changed in run_passes(output, skip):
        lines = listing(changed)
        _show_stage(f"after {name}", lines if lines != shown else ["no change"])
        output, shown = changed, lines
    return output


def _show_tasks(model: CausalLM, output: Node, arguments: argparse.Namespace) -> None:
    """Show the tasks of the shown layers. UsageError: no task computes one of the remaining operators."""
    options = DecodeOptions(
        num_ranks=arguments.ranks, num_workers=arguments.workers, row_buckets=(MAX_ROWS, MAX_BUCKET_ROWS)
    )
    graphs = lower_programs(Model(model.config, blocks_of(output, model.config)), options)
    for rows, graph in zip(options.row_buckets, graphs, strict=True):
        _show_stage(f"tasks of rank 0 in an iteration of up to {rows} tokens", list(_tasks(graph)))


def _tasks(graph: Graph) -> Iterator[str]:
    """One line for each operator: its tasks by type and launch."""
    counts = Counter((task.op, task.type_name, task.launch.name.lower()) for task in graph.tasks if task.rank == 0)
    for (op, type_name, launch), count in counts.items():
        yield f"{op:<24} {count:>4} {type_name} ({launch})"


def _show_stage(title: str, lines: list[str]) -> None:
    show(f"\n{title}:")
    for line in lines:
        show(f"  {line}")
