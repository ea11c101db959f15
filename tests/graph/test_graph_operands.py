"""What a graph refuses: operands of the wrong dtype, and missing ones."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from distmk import Graph
from distmk.abi import MAX_ROWS, Batch
from distmk.errors import UsageError
from distmk.program.program import compile_graph
from distmk.tasks import Affine, Linear, Put, Sum


@pytest.mark.parametrize(("wrong", "must"), [("x", "bf16"), ("out_bf16", "bf16"), ("out", "f32")])
def test_operands_are_of_the_dtype_that_a_body_takes(wrong: str, must: str) -> None:
    graph = Graph(1, 1)
    kinds = {"x": "bf16", "out_bf16": "bf16", "out": "f32"} | {wrong: "i32"}
    regions = {name: graph.buffer(name, 8, dtype=kind).at(0) for name, kind in kinds.items()}
    weight = graph.constant("w", 0, np.zeros((8, 8), np.uint16))
    with pytest.raises(UsageError, match=rf"task product: {wrong} must be {must}; {wrong}\[0:8\]@0 is i32"):
        graph.add(Linear(0, "product", slab=weight, **regions))


def test_missing_operands() -> None:
    graph = Graph(1, 1)
    here = graph.buffer("here", 8).at(0)
    with pytest.raises(UsageError, match="task twice has no dst; give it a region of f32"):
        graph.add(Affine(0, "twice", src=here, scale=2.0))
    with pytest.raises(UsageError, match="task total has no blocks; give it a region of f32"):
        graph.add(Sum(0, "total", dst=here))
    with pytest.raises(UsageError, match=r"task pass_on has no src; give it a region$"):
        graph.add(Put(0, "pass_on", dst=here))


def test_shapes_that_a_body_cannot_take() -> None:
    """Blocks of a sum that are not equally spaced; rows put from or to a part of a buffer."""
    graph = Graph(2, 1)
    wide, narrow = (graph.buffer(name, cols, rows=MAX_ROWS) for name, cols in (("wide", 12), ("narrow", 4)))
    batch = graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8").at(0)
    for blocks in ([(0, 4), (4, 8), (7, 11)], [(0, 4), (8, 12), (4, 8)]):
        graph.tasks.clear()
        graph.add(Sum(0, "total", blocks=tuple(wide.at(0, *cols) for cols in blocks), dst=narrow.at(0), batch=batch))
        with pytest.raises(UsageError, match="task total: its blocks must have the same shape and be equally spaced"):
            compile_graph(graph)
    for src, dst in ((wide.at(0), narrow.at(1)), (wide.at(0, 0, 4), wide.at(1, 0, 4)), (batch, batch.on(1))):
        with pytest.raises(UsageError, match="must be whole buffers of 16 rows, the same size and dtype"):
            Put(0, "rows", src=src, dst=dst, batch=batch)
