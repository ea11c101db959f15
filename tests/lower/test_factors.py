"""Programs whose matrices do not have norm weights and scales folded in: tasks multiply by them, and the logits are the same."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.families import FAMILIES, assert_near, make, random_prompts
from support.features import model_of
from support.helpers import ROOT, Runner
from support.machine import command, run_job
from support.programs import complaint
from support.tiny import relative_error
from support.tiny_config import tiny_config

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS
from distmk.backends.own_sources import require_bodies
from distmk.check import check
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import WeightKind
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.operators import Embedding, Model
from distmk.program.program import Program, compile_graph, decode_args
from distmk.tasks import Linear, ReduceRows, ScaledLinear, Task

JOB = ROOT / "tests" / "support" / "factors_job.py"
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 256, "o_bias": True}
BUCKETS = (MAX_ROWS, MAX_BUCKET_ROWS)


def at_each_number_of_ranks() -> list[Any]:
    """Every family at 1, 2 and 3 ranks, two of which are slow."""
    return [
        pytest.param(name, num_ranks, marks=[pytest.mark.slow] * (num_ranks != 1 + index % 3))
        for index, name in enumerate(FAMILIES)
        for num_ranks in (1, 2, 3)
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "num_ranks"), at_each_number_of_ranks())
def test_logits(name: str, num_ranks: int, rng: np.random.Generator, tmp_path: Path, runner: Runner) -> None:
    """Both forms are near transformers' logits and near each other, but not the same, as they round elsewhere."""
    model = make(name, int(rng.integers(1 << 30)))
    prompts, result = random_prompts(model, rng), tmp_path / "logits.npy"
    arguments = [str(tiny.save(model, tmp_path)), json.dumps(prompts), str(result), "16,40"]
    run_job(runner, command(JOB, *arguments, num_ranks=num_ranks))
    folded, unfolded = np.load(result)
    allowed = assert_near(model, prompts, unfolded, "factors left")
    between = relative_error(*(torch.from_numpy(form).double() for form in (unfolded, folded)))
    assert 0 < between <= allowed, f"{between:.3g} between the forms, {allowed:.3g} allowed"


def lowered(style: str, num_ranks: int, num_workers: int = 4, **changes: Any) -> tuple[Model, tuple[Graph, ...]]:
    num_layers = changes.pop("num_layers", 3)
    model = model_of(tiny_config(**SIZES, num_layers=num_layers), style).compile()
    options = DecodeOptions(num_ranks, num_workers, max_model_len=64, folds_factors=False, **changes)
    return model, lower_programs(model, options)


@pytest.mark.parametrize(
    ("style", "num_ranks"), [("gemma", 1), ("granite", 2), ("mixed", 3), ("olmo", 1), ("gemma", 2)]
)
def test_accepted(style: str, num_ranks: int) -> None:
    more: list[dict[str, Any]] = [{"host_sizes": (1, num_ranks - 1)}] if num_ranks > 1 else [{"loopback": True}]
    for changes in ({"row_buckets": BUCKETS}, {"attention_launch": "spread"}, {"deterministic": True}, *more):
        for num_layers, num_workers in ((1, 3), (3, 30)):
            check(compile_graph(*lowered(style, num_ranks, num_workers, num_layers=num_layers, **changes)[1]))


@pytest.mark.parametrize(("style", "num_ranks"), [("gemma", 1), ("granite", 2), ("mixed", 2)])
def test_operands(style: str, num_ranks: int) -> None:
    """Who writes x multiplies it by the norm of the operator that comes next, and leaves squares for all of its tasks."""
    model, (slabs, jobs) = lowered(style, num_ranks, row_buckets=BUCKETS)
    for graph in (slabs, jobs):
        assert not any(weight.col_scale for weight in graph.weights if weight.kind is WeightKind.MATRIX)
        assert {weight.scale for weight in graph.weights if weight.tiling or weight.name in ("head", "layer0.o")} == {
            1.0
        }
    for rank in range(num_ranks):
        _check_writers(model, [task for task in slabs.tasks if task.rank == rank])
        sums = [task for task in jobs.tasks if task.rank == rank and isinstance(task, ReduceRows)]
        for task, reader in zip(sums, model.operators[1:], strict=True):
            assert not isinstance(reader, Embedding)
            found = task.input_norm and (task.input_norm.weight.name, task.input_norm.weight.offset)
            assert found == (reader.norm and (f"{reader.norm}.weight", reader.norm_offset))


def _check_writers(model: Model, tasks: list[Task]) -> None:
    scaled = {op: list(group) for op, group in itertools.groupby(tasks, lambda task: task.op)}
    readers = ["layer0.qkv", "layer0.gate_up", "layer1.qkv", "layer1.gate_up", "layer2.qkv", "layer2.gate_up", "head"]
    for name, operator in zip(readers, model.operators[1:], strict=True):
        assert not isinstance(operator, Embedding)
        each: Any
        (x,) = {each.x for each in scaled[name]}
        (squares,) = {each.x_squares for each in scaled[name]}
        position = tasks.index(scaled[name][0])
        writers: list[Any] = []
        for each in tasks[:position][::-1]:
            if (
                (out := getattr(each, "out_bf16", None))
                and out.buffer is x.buffer
                and out.begin not in [w.out_bf16.begin for w in writers]
            ):
                writers.insert(0, each)
        assert (
            sorted(each.out_bf16.begin for each in writers)[0] == 0
            and sum(each.out_bf16.cols for each in writers) == 256
        )
        if operator.norm is None:
            assert squares is None and all(each.input_norm is None for each in writers)
            continue
        assert sorted(each.squares for each in writers) == [
            squares._replace(begin=at, end=at + 1) for at in range(squares.begin, squares.end)
        ]
        for each in writers:
            assert each.input_norm[1:] == (each.out_bf16.begin, each.out_bf16.end)
            weight = each.input_norm.weight
            assert (weight.name, weight.offset) == (f"{operator.norm}.weight", operator.norm_offset)


def program(num_ranks: int = 2) -> Program:
    return compile_graph(lowered("gemma", num_ranks, num_layers=2)[1][0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_wait_may_be_dropped(num_ranks: int) -> None:
    def waits(each: Program) -> list[tuple[Any, Any, int]]:
        return [
            (part, desc, desc.wait_begin + index)
            for part in each.ranks
            for desc in part.tasks
            if desc.type == ScaledLinear.type_id
            for index in range(desc.num_waits)
        ]

    for number in range(0, len(waits(program(num_ranks))), 5):
        damaged = program(num_ranks)
        part, desc, index = waits(damaged)[number]
        last = desc.wait_begin + desc.num_waits - 1
        part.waits[index] = type(part.waits[last]).from_buffer_copy(part.waits[last])
        desc.num_waits -= 1
        assert complaint(damaged), f"wait {index} of task {desc.order} on rank {part.header.rank}"


DAMAGE: list[tuple[str, str, float]] = [
    *(("layer1.qkv", field, 4096) for field in ("x_squares", "num_squares", "x_squares_stride")),
    *(("layer1.qkv", field, -math.inf) for field in ("num_squares", "x_squares")),
    ("layer1.o", "scale", math.nan),
    *(("layer0.o.norm", field, 1 << 24) for field in ("input_norm.weight", "input_norm.squares")),
    *(("layer0.o.norm", field, -math.inf) for field in ("input_norm.weight", "input_norm.squares", "out_bf16")),
    ("layer0.o.norm", "input_norm.squares_stride", 4096),
]


@pytest.mark.parametrize(("op", "field", "change"), DAMAGE)
def test_damaged_arguments_are_refused(op: str, field: str, change: float) -> None:
    """change: what is added; minus infinity: the argument becomes 0."""
    damaged = program()
    part = damaged.ranks[1]
    args: Any = decode_args([desc for desc, name in zip(part.tasks, part.task_names, strict=True) if name == op][-1])
    *outer, name = field.split(".")
    holder = getattr(args, outer[0]) if outer else args
    setattr(holder, name, 0 if change == -math.inf else getattr(holder, name) + change)
    assert complaint(damaged)


def test_devices_refuse_it() -> None:
    """They multiply matrices that have their factors, and have no body of the other form."""
    with pytest.raises(
        UsageError, match=r"^folds_factors is False, but GPUs and the emulator .* choose the host backend$"
    ):
        DecodeOptions(tiled=True, folds_factors=False)
    made = program()
    require_bodies(made.ranks, "host", "host")
    with pytest.raises(
        UsageError, match=r"of type scaled_linear, which has no device body for the emulated backend; choose"
    ):
        require_bodies(made.ranks, "device", "emulated")
    plain = compile_graph(*lower_programs(model_of(tiny_config(), "gemma").compile(), DecodeOptions(max_model_len=64)))
    require_bodies(plain.ranks, "device", "emulated")
    assert any(isinstance(task, Linear) for task in lowered("gemma", 1)[1][0].tasks)
