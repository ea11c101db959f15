"""How operators are cut into tasks, and what tasks refuse."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
from support import reference
from support.tiny_config import tiny_config

from distmk import Graph
from distmk.abi import COMBINE_WIDTH, POSITIONS_PER_PASS, Epilogue
from distmk.check import check
from distmk.errors import UsageError
from distmk.lower import DecodeOptions, lower
from distmk.model.operators import build_model
from distmk.program.program import compile_graph
from distmk.tasks import Affine, Attention, AttentionShape, Combine, Linear, Put, Sum


def merges(max_seqs: int, num_workers: int, head_dim: int) -> list[list[Combine]]:
    """Of the first layer, by rank."""
    config = tiny_config(num_heads=6, num_kv_heads=3, head_dim=head_dim)
    options = DecodeOptions(2, num_workers, max_seqs=max_seqs, max_model_len=64)
    tasks = [
        t for t in lower(build_model(config), options).tasks if isinstance(t, Combine) and t.op.startswith("layer0.")
    ]
    return [[task for task in tasks if task.rank == rank] for rank in range(2)]


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
@pytest.mark.parametrize("max_seqs", [1, 2, 4, 16])
@pytest.mark.parametrize("num_workers", [1, 5, 100])
def test_merges_share_out_the_heads(num_workers: int, max_seqs: int, head_dim: int) -> None:
    for tasks in merges(max_seqs, num_workers, head_dim):
        shape = tasks[0].shape
        ends = [0, *(task.out.end for task in tasks)]
        assert [task.out.begin for task in tasks] == ends[:-1] and ends[-1] == shape.num_q * head_dim
        for task in tasks:
            parts = tuple(end * shape.partial_cols for end in task.slices)
            assert (task.partials.begin, task.partials.end) == parts, "other parts than those of its slices"
        assert len(tasks) <= num_workers and [task.worker for task in tasks] == list(range(len(tasks)))


@pytest.mark.parametrize(
    ("num_workers", "max_seqs", "max_model_len", "long"),
    [
        (132, 1, 1024, False),
        (132, 1, 1025, True),
        (6, 1, 384, False),
        (6, 1, 385, True),
        (132, 2, 128, False),
        (132, 2, 129, True),
    ],
)
def test_who_has_long_splits(num_workers: int, max_seqs: int, max_model_len: int, long: bool) -> None:
    """A sequence by itself is split among the workers, eight times at least if they are enough; beside others perhaps not."""
    config = tiny_config(num_heads=4, num_kv_heads=2, max_position=2048)
    options = DecodeOptions(1, num_workers, max_seqs=max_seqs, max_model_len=max_model_len)
    tasks = [task for task in lower(build_model(config), options).tasks if isinstance(task, Attention)]
    assert tasks and all(task.long_splits == long for task in tasks)


def test_a_lone_row_has_few_splits() -> None:
    """All who multiply it merge them, so there may be no more than are merged in one go. More come only where few are long."""
    for num_workers, max_splits, min_split in itertools.product((5, 30, 31, 32, 33, 64), (7, 15, 16, 32), (1, 3, 64)):
        shape = AttentionShape(4, 2, 64, 2, 0, 0, 16, 64, 64, max_splits, min_split, num_workers)
        more = min(num_workers // 2, max_splits) >= 2 * COMBINE_WIDTH
        for kv_len in (1, 2, 7, 8, 15, 16, 17, 59, 60, 61, 180, 181, 960, 3839, 3840, 3841, 5000):
            splits = reference.num_splits([kv_len], 0, 2, num_workers, min_split, max_splits)
            assert (kv_len > shape.fused_combine_len) == (more and kv_len > 60 * min_split), (shape, kv_len)
            assert kv_len <= shape.fused_combine_len or splits > COMBINE_WIDTH, (shape, kv_len, splits)


def test_more_rows_are_merged_by_more_tasks() -> None:
    """As long as there are workers, until each has 32 elements of a head."""
    counts = [len(merges(max_seqs, 1000, 128)[1]) for max_seqs in (1, 2, 4, 16)]
    assert counts == [3, 6, 12, 12], "three heads of four slices each"
    fewer = [len(merges(16, num_workers, 128)[1]) for num_workers in (1, 5, 11)]
    assert fewer == [1, 5, 11]


@pytest.mark.parametrize(
    ("changes", "launch", "fused_partials"),
    [
        ({"head_dim": 64}, "spread", True),
        ({"head_dim": 128, "num_heads": 64}, "spread", True),
        ({"head_dim": 128, "num_heads": 66}, "spread", False),  # 4224 columns a rank
        ({"head_dim": 80}, "spread", False),
        ({"head_dim": 64, "num_layers": 1}, "spread", False),
        ({"head_dim": 64}, "massive", False),
    ],
)
def test_who_merges_a_lone_row(
    changes: dict[str, int], launch: Literal["massive", "spread"], fused_partials: bool
) -> None:
    """Tasks that multiply it, where they can; then merges are of workers that have no part of a single row's attention."""
    config = tiny_config(**{"num_layers": 2, "num_heads": 6, "num_kv_heads": 2, **changes})
    options = DecodeOptions(2, 7, max_seqs=1, max_model_len=64, attention_launch=launch)
    tasks = lower(build_model(config), options).tasks
    assert {bool(task.fused_partials) for task in tasks if isinstance(task, Linear) and task.op.endswith(".o")} == {
        fused_partials
    }
    for rank in range(2):
        merges = [task for task in tasks if isinstance(task, Combine) and task.rank == rank and task.op[:6] == "layer0"]
        workers = [*range(7 - len(merges), 7)] if fused_partials else [*range(len(merges))]
        assert [(task.skips_fused, task.worker) for task in merges] == [(fused_partials, worker) for worker in workers]


def dealt(num_heads: int, max_seqs: int, max_model_len: int = 64) -> tuple[list[int], list[int]]:
    """Rows of qkv of each of 20 workers, in a model with one KV head, whose attention of one sequence is the first eight's;
    and who has a layer's merges.
    """
    config = tiny_config(num_heads=num_heads, num_kv_heads=1, head_dim=64, hidden_size=256, num_layers=2)
    options = DecodeOptions(1, 20, max_seqs=max_seqs, max_model_len=max_model_len, attention_launch="spread")
    found = lower(build_model(config), options).tasks
    slabs = [task.slab for task in found if isinstance(task, Linear) and task.op == "layer0.qkv"]
    ends = [0, *(slab.row_end for slab in slabs)]
    assert [slab.row_begin for slab in slabs] == ends[:-1] and ends[-1] == 64 * (num_heads + 2), (
        "rows left out, or twice"
    )
    return [slab.rows for slab in slabs], [
        t.worker for t in found if isinstance(t, Combine) and t.op == "layer0.combine"
    ]


def test_who_has_attention_has_fewer_rows_of_qkv() -> None:
    """In whole groups of rows, and the merges; where several sequences may come, or a long one, all workers have attention, and
    where rows are few all have as many.
    """
    rows, merges = dealt(12, max_seqs=1)
    assert len(rows) == 20 and set(rows[:8]) == {32} and set(rows[8:]) == {52, 54}
    assert merges == [2, 3, 4, 5, 6, 7]
    longest = 2 * COMBINE_WIDTH * POSITIONS_PER_PASS
    assert dealt(12, max_seqs=1, max_model_len=longest) == (rows, merges)
    others = [({"max_seqs": 2}, {44, 46}), ({"max_seqs": 1, "max_model_len": longest + 1}, {44, 46})]
    for options, even in others:
        rows, merges = dealt(12, **options)
        assert set(rows) == even and merges == [*range(20 - len(merges), 20)], options
    rows, merges = dealt(8, max_seqs=1)
    assert set(rows) == {32} and merges == [16, 17, 18, 19]


@pytest.mark.parametrize("launch", ["massive", "spread"])
def test_a_rank_by_itself_adds_up_as_several_do(launch: Literal["massive", "spread"]) -> None:
    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=1152, num_layers=3)

    def ops(num_ranks: int, loopback: bool) -> list[tuple[str, str]]:
        options = DecodeOptions(num_ranks, 40, max_seqs=1, max_model_len=64, attention_launch=launch, loopback=loopback)
        graph = lower(build_model(config), options)
        check(compile_graph(graph))
        return list({(task.op, type(task).__name__): None for task in graph.tasks if task.rank == 0})

    assert ops(1, True) == ops(2, False) and ("layer0.o.reduce", "Sum") in ops(1, True)
    assert not [name for _, name in ops(1, False) if name == "Sum"]


@pytest.mark.parametrize(("wrong", "must"), [("x", "bf16"), ("out_bf16", "bf16"), ("out", "f32")])
def test_operands_are_of_the_dtype_that_a_body_takes(wrong: str, must: str) -> None:
    graph = Graph(1, 1)
    kinds = {"x": "bf16", "out_bf16": "bf16", "out": "f32"} | {wrong: "i32"}
    regions = {name: graph.buffer(name, 8, dtype=kind).at(0) for name, kind in kinds.items()}
    weight = graph.constant("w", 0, np.zeros((8, 8), np.uint16))
    with pytest.raises(UsageError, match=rf"task product: {wrong} must be {must}; {wrong}\[0:8\]@0 is i32"):
        graph.add(Linear(0, "product", slab=weight, **regions))


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ({"shape": None}, "give it a shape and a batch"),
        ({"epilogue": Epilogue.ARGMAX}, "another epilogue than ARGMAX"),
        ({"num_q": 3}, "of 3 heads of 64 as 128 columns; it must be all of them"),
        ({"head_dim": 32, "num_q": 4}, "heads a multiple of 64"),
        ({"num_q": 66, "k": 66 * 64}, "at most 4096"),
    ],
)
def test_lone_rows_that_cannot_be_merged(changes: dict[str, Any], must: str) -> None:
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
    with pytest.raises(UsageError, match=f"task product takes a lone row.*{must}"):
        Linear(0, "product", x=x, slab=weight, out=out, batch=batch, fused_partials=fused_partials, **given)


def test_missing_operands() -> None:
    graph = Graph(1, 1)
    here = graph.buffer("here", 8).at(0)
    with pytest.raises(UsageError, match="task twice has no dst; give it a region of f32"):
        graph.add(Affine(0, "twice", src=here, scale=2.0))
    with pytest.raises(UsageError, match="task total has no blocks; give it a region of f32"):
        graph.add(Sum(0, "total", dst=here))
    with pytest.raises(UsageError, match=r"task pass_on has no src; give it a region$"):
        graph.add(Put(0, "pass_on", dst=here))
