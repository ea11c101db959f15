"""Emitters depend on their arguments alone: neither on what was emitted before nor on how often."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.features import model_of
from support.tiny_config import tiny_config

from distmk.graph.graph import Graph
from distmk.graph.task import Task
from distmk.lower import DecodeOptions, emit_operator, lower_programs
from distmk.lower.plan import plan_work
from distmk.lower.slab_buffers import declare_slab_buffers
from distmk.model.operators import Model, Operator
from distmk.models import build_model

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"attention_launch": "spread", "max_seqs": 1}),  # rotating buffers, a fused combine, reserved workers
    (2, {"attention_launch": "massive"}),
    (1, {"attention_launch": "spread", "max_seqs": 1, "tiled": True, "keep_logits": True}),
]


def small_model(style: str | None = None) -> Model:
    """Five layers, so that rotations end in the middle of a period."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 256, "num_layers": 5}
    config = tiny_config(**sizes, qkv_bias=True, o_bias=True, mlp_bias=True)
    return build_model(config) if style is None else model_of(config, style).compile()


def text(task: Task) -> str:
    """A task with all of its operands: every buffer, column, weight and checkpoint row."""
    return repr(task)


def emitted(model: Model, options: DecodeOptions, op: Operator, *, before: tuple[Operator, ...] = ()) -> list[str]:
    """The tasks of `op` in a graph to which `before` was added first."""
    graph, plan = Graph(options.num_ranks, options.num_workers), plan_work(model, options)
    buffers = declare_slab_buffers(graph, plan, options.buckets[0])
    for other in before:
        emit_operator(graph, plan, buffers, other)
    num_before = len(graph.tasks)
    emit_operator(graph, plan, buffers, op)
    return [text(task) for task in graph.tasks[num_before:]]


@pytest.mark.parametrize("style", [None, "gemma"])
@pytest.mark.parametrize(("num_ranks", "changes"), CASES)
def test_any_order_gives_the_same_tasks(num_ranks: int, changes: dict[str, Any], style: str | None) -> None:
    """Each operator alone, twice, and behind others in a random order: the tasks that it has in the whole graph."""
    model, options = small_model(style), DecodeOptions(num_ranks, 30, max_model_len=64, **changes)
    whole = [text(task) for task in lower_programs(model, options)[0].tasks[1:]]  # behind the scheduler step
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    for op in model.operators:
        alone = emitted(model, options, op)
        assert alone == whole[: len(alone)], f"{op}: alone, not as in its place"
        others = tuple(source.sample(model.operators, k=3))
        assert emitted(model, options, op, before=(op,)) == alone, f"{op}: once more, and not the same"
        assert emitted(model, options, op, before=others) == alone, f"{op}: behind others, seed {seed}"
        whole = whole[len(alone) :]
    assert not whole


def test_layers_differ_in_their_buffers() -> None:
    """What the test above compares does tell one layer from another."""
    model, options = small_model(), DecodeOptions(2, 30, max_seqs=1, max_model_len=64, attention_launch="spread")
    _, first, _, second, *_ = model.operators
    unnamed = [[task.replace(f"layer{n}", "").replace(f"layers.{n}", "") for task in emitted(model, options, op)]
               for n, op in enumerate((first, second))]  # fmt: skip
    assert unnamed[0] != unnamed[1]
