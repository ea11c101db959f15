"""The combine fused into a linear task: which single rows qualify, and what `Linear` refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support import reference

from distmk import Graph
from distmk.abi import COMBINE_WIDTH, Epilogue
from distmk.errors import UsageError
from distmk.tasks import AttentionShape, Linear


def test_a_single_row_has_few_splits() -> None:
    """Every task of the projection reads all of them, so up to `fused_combine_len` positions at most COMBINE_WIDTH."""
    for num_workers, max_kv_splits, min_kv_split_len in itertools.product(
        (5, 30, 31, 32, 33, 64), (7, 15, 16, 32), (1, 3, 64)
    ):
        shape = AttentionShape(4, 2, 64, 2, 0, 0, 16, 64, 64, max_kv_splits, min_kv_split_len, num_workers)
        more = min(num_workers // 2, max_kv_splits) >= 2 * COMBINE_WIDTH
        for kv_len in (1, 2, 7, 8, 15, 16, 17, 59, 60, 61, 180, 181, 960, 3839, 3840, 3841, 5000):
            splits = reference.num_splits([kv_len], 0, 2, num_workers, min_kv_split_len, max_kv_splits)
            assert (kv_len > shape.fused_combine_len) == (more and kv_len > 60 * min_kv_split_len), (shape, kv_len)
            assert kv_len <= shape.fused_combine_len or splits > COMBINE_WIDTH, (shape, kv_len, splits)


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ({"shape": None}, "give it a shape and a batch"),
        ({"epilogue": Epilogue.ARGMAX}, "another epilogue than ARGMAX"),
        ({"num_q": 3}, "of 3 heads of 64 as 128 columns; it must be all of them"),
        ({"head_dim": 32, "num_q": 4}, "heads a power of two from 64 on"),
        ({"head_dim": 192, "num_q": 1, "k": 192}, "heads a power of two from 64 on"),
        ({"num_q": 66, "k": 66 * 64}, "at most 4096"),
    ],
)
def test_a_combine_that_cannot_be_fused(changes: dict[str, Any], must: str) -> None:
    graph, k = Graph(1, 1), changes.get("k", 128)
    x, fused_partials, batch = (graph.buffer(name, k, dtype="bf16").at(0) for name in ("x", "fused_partials", "batch"))
    num_q, head_dim = changes.get("num_q", 2), changes.get("head_dim", 64)
    shape = AttentionShape(num_q, 1, head_dim, num_q, 0, 0, 16, 4, 4, 2, 64, 1)
    weight, out = graph.constant("w", 0, np.zeros((8, k), np.uint16)), graph.buffer("out", 8).at(0)
    given = {
        "shape": shape,
        "epilogue": Epilogue.STORE,
        **{k: v for k, v in changes.items() if k in ("shape", "epilogue")},
    }
    with pytest.raises(UsageError, match=f"task product combines a single row.*{must}"):
        Linear(0, "product", x=x, slab=weight, out=out, batch=batch, fused_partials=fused_partials, **given)
