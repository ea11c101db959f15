"""Programs of models that normalize what they add to the residual stream: `check` proves them, and misses nothing of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.features import model_of
from support.programs import complaint, refusal
from support.tiny_config import tiny_config

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS
from distmk.check import check
from distmk.lower import DecodeOptions, lower_programs
from distmk.program.program import Program, compile_graph, decode_args
from distmk.tasks import Linear, PostNorm, Sum

SPREAD = {"attention_launch": "spread", "tiled": True}
OPTIONS: list[dict[str, Any]] = [
    {"row_buckets": (MAX_ROWS, MAX_BUCKET_ROWS)},
    SPREAD,
    {**SPREAD, "max_seqs": 1, "row_buckets": (MAX_ROWS, MAX_BUCKET_ROWS)},
]
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 256}


@pytest.mark.whole
@pytest.mark.parametrize(("style", "num_ranks"), [("gemma", 1), ("olmo", 2), ("gemma", 3), ("mixed", 3)])
def test_accepted(style: str, num_ranks: int) -> None:
    """With rotating buffers, and without (of one layer); with workers that poll, and a fused combine."""
    hosts = (
        [{"host_sizes": (1, num_ranks - 1), **changes} for changes in ({}, SPREAD)]
        if num_ranks > 1
        else [{"loopback": True, **SPREAD}]
    )
    for changes in (*OPTIONS, *hosts):
        for num_layers, num_workers in ((1, 3), (3, 30)):
            model = model_of(tiny_config(**SIZES, num_layers=num_layers), style).compile()
            options = DecodeOptions(num_ranks, num_workers, max_model_len=64, **changes)
            check(compile_graph(*lower_programs(model, options)))


def program(num_ranks: int = 2, style: str = "gemma") -> Program:
    model = model_of(tiny_config(**SIZES, num_layers=2), style).compile()
    return compile_graph(*lower_programs(model, DecodeOptions(num_ranks, 4, max_model_len=64, **SPREAD)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_operands(num_ranks: int) -> None:
    """All of y is read for columns of x, which are those that the task's worker has summed; other tasks of x keep to it."""
    model = model_of(tiny_config(**SIZES, num_layers=3), "mixed").compile()
    graph = lower_programs(model, DecodeOptions(num_ranks, 4, max_model_len=64, **SPREAD))[0]
    norms = [task for task in graph.tasks if isinstance(task, PostNorm)]
    assert {task.op for task in norms} == {f"layer{layer}.down.norm" for layer in range(3)}
    for task in norms:
        before: list[Any] = [
            each
            for each in graph.tasks
            if isinstance(each, Linear if num_ranks == 1 else Sum)
            and (each.rank, each.worker) == (task.rank, task.worker)
            and each.op in (task.op.replace(".norm", ""), task.op.replace("norm", "reduce"))
        ]
        (summed,) = (each.out if num_ranks == 1 else each.dst for each in before)
        assert summed == task.y._replace(begin=task.x.begin, end=task.x.end) and summed.buffer.name == "post_norm_input"
        assert (task.y.begin, task.y.end) == (0, 256) and task.col_begin == task.weight.row_begin == task.x.begin
        assert (task.out_bf16 or task.x)[2:] == task.x[2:]
    polling = {task.op[7:] for task in graph.tasks if isinstance(task, Linear) and task.polls_x}
    assert polling == {"qkv", "o", "gate_up"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_wait_may_be_dropped(num_ranks: int) -> None:
    def waits(each: Program) -> list[tuple[Any, Any, int]]:
        return [
            (part, desc, desc.wait_begin + index)
            for part in each.ranks
            for desc in part.tasks
            if desc.type == PostNorm.type_id
            for index in range(desc.num_waits)
        ]

    num_waits = len(waits(program(num_ranks)))
    assert num_waits >= 2 * 2 * num_ranks
    for number in range(0, num_waits, 3):
        damaged = program(num_ranks)
        part, desc, index = waits(damaged)[number]
        last = desc.wait_begin + desc.num_waits - 1
        part.waits[index] = type(part.waits[last]).from_buffer_copy(part.waits[last])
        desc.num_waits -= 1
        assert complaint(damaged), f"wait {index} of task {desc.order} on rank {part.header.rank}"


@pytest.mark.parametrize(
    "field", ["k", "num_cols", "col_begin", "y_stride", "x_stride", "out_bf16_stride", "y", "x", "weight"]
)
def test_damaged_arguments_are_refused(field: str) -> None:
    damaged = program()
    part = damaged.ranks[1]
    descs = [desc for desc, name in zip(part.tasks, part.task_names, strict=True) if name == "layer0.o.norm"]
    args = decode_args(descs[-1])  # of the last columns
    setattr(args, field, getattr(args, field) + 4096)
    assert complaint(damaged)


def test_a_smaller_y_is_refused() -> None:
    damaged = program()
    pieces = damaged.placement.pieces
    small = next(piece for piece in pieces if piece.name == "post_norm_input")
    less = dataclasses.replace(small, row_bytes=small.row_bytes - 16)
    damaged.placement = dataclasses.replace(damaged.placement, pieces=tuple(less if p is small else p for p in pieces))
    assert "bounds: " in refusal(damaged)
