"""What a graph refuses: operands of the wrong dtype, and missing ones."""

from __future__ import annotations

import numpy as np
import pytest

from distmk import Graph
from distmk.errors import UsageError
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
