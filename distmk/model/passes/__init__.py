"""Compiler passes over a model's operators: from plain ones to those that tasks compute, one rewrite each.

`PASSES` is their order. A pass that is skipped leaves its operators plain, which `distmk graph` shows; lowering refuses those
that no task computes by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from distmk.errors import UsageError
from distmk.model.nodes import Node
from distmk.model.passes.fold_norms import fold_norms
from distmk.model.passes.fold_scales import fold_scales
from distmk.model.passes.fuse_attention import fuse_attention
from distmk.model.passes.fuse_gated import fuse_gated
from distmk.model.passes.fuse_residual import fuse_residual
from distmk.model.passes.place_sums import place_sums
from distmk.model.passes.slice_matrices import slice_matrices

PASSES: Mapping[str, Callable[[Node], Node]] = {
    "slice_matrices": slice_matrices,
    "fold_scales": fold_scales,
    "fold_norms": fold_norms,
    "fuse_attention": fuse_attention,
    "fuse_gated": fuse_gated,
    "place_sums": place_sums,
    "fuse_residual": fuse_residual,
}


def run_passes(output: Node, skip: Collection[str] = ()) -> Iterator[tuple[str, Node]]:
    """Each pass that is not skipped, by name, and what it makes of the nodes behind `output`. UsageError: an unknown name."""
    if unknown := sorted(set(skip) - set(PASSES)):
        raise UsageError(f"there is no pass {', '.join(unknown)}; passes are {', '.join(PASSES)}")
    for name, apply in PASSES.items():
        if name not in skip:
            output = apply(output)
            yield name, output


def compiled(output: Node, skip: Collection[str] = ()) -> Node:
    """`output` after all passes that are not skipped."""
    for _, changed in run_passes(output, skip):
        output = changed
    return output
