"""Programs for tests of `check`, and the text of its refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.tiny_config import tiny_config

from distmk.abi import TaskDesc
from distmk.check import check
from distmk.errors import CheckError
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.model.operators import Model, SelfAttention
from distmk.models import build_model
from distmk.program.program import Program

SMALLEST = tiny_config(
    "qwen3-0.6b", hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=128
)


def model_graph(num_ranks: int, num_workers: int, config: ModelConfig = SMALLEST, **options: Any) -> Graph:
    made = DecodeOptions(num_ranks, num_workers, max_model_len=64, max_kv_splits=2, **options)
    return lower_programs(build_model(config), made)[0]


def with_attention(model: Model, layers: Sequence[Mapping[str, Any]]) -> Model:
    """`model` with other fields of the attention of successive layers; those of `layers`, over and over."""
    operators = (
        replace(op, **layers[op.layer % len(layers)]) if isinstance(op, SelfAttention) else op for op in model.operators
    )
    return replace(model, operators=tuple(operators))


def refusal(program: Program) -> str:
    with pytest.raises(CheckError) as caught:
        check(program)
    return str(caught.value)


def complaint(program: Program) -> str:
    """What `check` says against a program; nothing where it is right."""
    try:
        check(program)
    except CheckError as error:
        return str(error)
    return ""


def find(program: Program, name: str, rank: int = 0) -> TaskDesc:
    part = program.ranks[rank]
    found: TaskDesc = part.tasks[part.task_names.index(name)]
    return found


def copies(program: Program, name: str, rank: int = 0) -> list[TaskDesc]:
    """The descriptors of a spread task, by worker."""
    part = program.ranks[rank]
    return [desc for desc, its_name in zip(part.tasks, part.task_names, strict=True) if its_name == name]
