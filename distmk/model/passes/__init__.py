"""Compiler passes over a model's operators.

Each is one rewrite on the way from plain operators to those that tasks compute.

`PASSES` is their order. If a pass is skipped, its operators stay plain, which `distmk graph` shows. Lowering refuses
operators that no task computes by itself.
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
    """Runs each pass that is not skipped, and yields its name and the new output. UsageError: an unknown name in `skip`."""
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
