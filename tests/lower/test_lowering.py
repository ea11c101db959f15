"""Whole graphs: the long-split flag, layers whose attention differs, and a rank alone that runs the all-reduces."""

from __future__ import annotations

from typing import Literal

import pytest
from support.programs import with_attention
from support.tiny_config import tiny_config

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, Scores
from distmk.check import check
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import compile_graph
from distmk.tasks import Attention, AttentionJobs, Combine, GeneralAttention, Linear
from distmk.tasks.splits import ANY_LENGTH


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
def test_which_programs_have_long_splits(num_workers: int, max_seqs: int, max_model_len: int, long: bool) -> None:
    """A sequence alone has a split per worker, eight at least if there are workers; beside others perhaps one split."""
    config = tiny_config(num_heads=4, num_kv_heads=2, max_position=2048)
    options = DecodeOptions(1, num_workers, max_seqs=max_seqs, max_model_len=max_model_len)
    tasks = [task for task in lower_programs(build_model(config), options)[0].tasks if isinstance(task, Attention)]
    assert tasks and all(task.long_splits == long for task in tasks)


@pytest.mark.parametrize(("launch", "head_dim"), [("massive", 64), ("spread", 64), ("spread", 256)])
def test_layers_that_differ(launch: Literal["massive", "spread"], head_dim: int) -> None:
    """Each task has its layer's fields; a window that no sequence outgrows is none; and the programs are proved."""
    model = build_model(tiny_config(num_heads=4, num_kv_heads=2, head_dim=head_dim, num_layers=6))
    layers = ({"window": 9}, {"scores": Scores(0.2, 3.0)}, {"window": 64})
    options = DecodeOptions(
        2, 30, max_seqs=1, max_model_len=64, attention_launch=launch, row_buckets=(MAX_ROWS, MAX_BUCKET_ROWS)
    )
    slabs, jobs = lower_programs(with_attention(model, layers), options)
    check(compile_graph(slabs, jobs))
    wanted = ((9, None, None), (ANY_LENGTH, 0.2, 3.0), (ANY_LENGTH, None, None))
    for task in (*slabs.tasks, *jobs.tasks):
        if isinstance(task, (Attention, Combine, AttentionJobs)) or (isinstance(task, Linear) and task.fused_partials):
            shape = task.shape
            layer = int(task.op.removeprefix("layer").partition(".")[0])
            assert shape and (shape.window, shape.scores.scale, shape.scores.softcap) == wanted[layer % 3], task.op
            assert not isinstance(task, Attention) or type(task) is (
                GeneralAttention if shape.scores.softcap or head_dim == 256 else Attention
            )


@pytest.mark.parametrize("launch", ["massive", "spread"])
def test_combine_tasks_read_the_partials_of_their_slices(launch: Literal["massive", "spread"]) -> None:
    config = tiny_config(num_heads=6, num_kv_heads=3, head_dim=128)
    options = DecodeOptions(2, 7, max_model_len=64, attention_launch=launch)
    tasks = [task for task in lower_programs(build_model(config), options)[0].tasks if isinstance(task, Combine)]
    for task in tasks:
        partials = tuple(end * task.shape.partial_cols for end in task.slices)
        assert (task.partials.begin, task.partials.end) == partials
        assert (task.out.begin, task.out.end) == tuple(32 * end for end in task.slices)
    assert {task.skips_fused for task in tasks} == {launch == "spread"}


@pytest.mark.parametrize("launch", ["massive", "spread"])
def test_a_rank_alone_runs_the_all_reduces_of_several(launch: Literal["massive", "spread"]) -> None:
    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=1152, num_layers=3)

    def ops(num_ranks: int, loopback: bool) -> list[tuple[str, str]]:
        options = DecodeOptions(num_ranks, 40, max_seqs=1, max_model_len=64, attention_launch=launch, loopback=loopback)
        graph = lower_programs(build_model(config), options)[0]
        check(compile_graph(graph))
        return list({(task.op, type(task).__name__): None for task in graph.tasks if task.rank == 0})

    assert ops(1, True) == ops(2, False) and ("layer0.o.reduce", "Sum") in ops(1, True)
    assert not [name for _, name in ops(1, False) if name == "Sum"]
