"""What a graph refuses: operands of the wrong dtype, and missing ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distmk import Graph
from distmk.abi import MAX_ROWS, Batch
from distmk.errors import UsageError
from distmk.program.program import Program, compile_graph
from distmk.tasks import Affine, Linear, Put, Sum, Task


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
    large, small = (graph.buffer(name, cols, rows=MAX_ROWS) for name, cols in (("large", 12), ("small", 4)))
    batch = graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8").at(0)
    for blocks in ([(0, 4), (4, 8), (7, 11)], [(0, 4), (8, 12), (4, 8)]):
        graph.tasks.clear()
        graph.add(Sum(0, "total", blocks=tuple(large.at(0, *cols) for cols in blocks), dst=small.at(0), batch=batch))
        with pytest.raises(UsageError, match="task total: its blocks must have the same shape and be equally spaced"):
            compile_graph(graph)
    for src, dst in ((large.at(0), small.at(1)), (large.at(0, 0, 4), large.at(1, 0, 4)), (batch, batch.on(1))):
        with pytest.raises(UsageError, match="must be whole buffers of 16 rows, the same size and dtype"):
            Put(0, "rows", src=src, dst=dst, batch=batch)


def test_a_row_of_many_elements() -> None:
    """As KV caches have."""
    assert Graph(1).buffer("cache", 1 << 34, dtype="bf16").cols == 1 << 34


def test_mistakes_are_named() -> None:
    """Of every kind that a newcomer makes; each is one line."""
    graph, other = Graph(2, 1), Graph(2, 1)
    a, b, far = graph.buffer("a", 8), graph.buffer("b", 8), other.buffer("far", 8)

    def affine(**changed: Any) -> Task:
        return Affine(**{"rank": 0, "op": "twice", "src": a.at(0), "dst": b.at(0), "scale": 2.0} | changed)

    def compiled(task: Task) -> Program:
        made = Graph(2, 1, buffers=[a, b])
        made.add(task)
        return compile_graph(made)

    mistakes: dict[str, Callable[[], object]] = {
        "num_ranks is 'two'; expected 1 to 64": lambda: Graph("two"),
        "num_workers is 0; expected 1 or more": lambda: Graph(1, 0),
        "num_schedulers is 2; expected 1 to 1": lambda: Graph(1, 1, 2),
        "cols of buffer c is 4.0; expected a whole number": lambda: graph.buffer("c", 4.0),
        "cols of buffer c is 4294967296; expected .* to 2147483647": lambda: graph.buffer("c", 1 << 32, rows=2),
        "dtype of buffer c is torch.float32; expected one of f32, bf16": lambda: graph.buffer(
            "c", 4, dtype=torch.float32
        ),
        "the name of a buffer is None; expected text": lambda: graph.buffer(None, 4),
        "columns are whole numbers": lambda: a.at(0, 0, 8 / 2),
        "None is no task": lambda: graph.add(None),
        "src is Buffer.*; give a region, such as buffer.at": lambda: graph.add(affine(src=a)),
        "task twice is on rank '0' of 2": lambda: graph.add(affine(rank="0")),
        "task twice is for worker 1.5 of 1": lambda: graph.add(affine(worker=1.5)),
        "launch 'spread'; give one of LaunchKind": lambda: graph.add(affine(launch="spread")),
        "constant c is float32 .2, 2, 2. on": lambda: graph.constant("c", 0, np.zeros((2, 2, 2), np.float32)),
        "constant c is float32 .2. on rank 2 of 2": lambda: graph.constant("c", 2, np.zeros(2, np.float32)),
        "constant c is no array: .*BFloat16": lambda: graph.constant("c", 0, torch.ones(2).bfloat16()),
        "^far.0:8.@0 is of another graph": lambda: compiled(affine(src=far.at(0))),
        "task twice: encode.. of Affine fails: TypeError: must be real": lambda: compiled(affine(scale="2")),
    }
    for text, make in mistakes.items():
        with pytest.raises(UsageError, match=text) as raised:
            make()
        assert "\n" not in str(raised.value)
