"""The work plan: which workers get which rows, and which of them combine, are reserved, or poll."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
from support.tiny_config import tiny_config

from distmk.abi import COMBINE_WIDTH, M_TILE, POSITIONS_PER_PASS
from distmk.lower.options import DecodeOptions
from distmk.lower.plan import WorkPlan, plan_work
from distmk.lower.worker_roles import single_row_workers
from distmk.model.presets import PRESETS
from distmk.models import build_model


def plan(num_ranks: int, num_workers: int, config: dict[str, Any], **options: Any) -> WorkPlan:
    made = DecodeOptions(num_ranks, num_workers, **{"max_model_len": 64, **options})
    return plan_work(build_model(tiny_config(**config)), made)


def test_a_plan_is_a_value() -> None:
    """Equal inputs give equal plans, and nothing can change one."""
    made = [plan(2, 40, {"head_dim": 64}, max_seqs=1, attention_launch="spread") for _ in range(2)]
    assert made[0] == made[1] and hash(made[0]) == hash(made[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        made[0].roles.num_reserved = 1  # type: ignore[misc]


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
@pytest.mark.parametrize("max_seqs", [1, 2, 4, 16])
@pytest.mark.parametrize("num_workers", [1, 5, 100])
def test_combine_tasks_cover_the_heads(num_workers: int, max_seqs: int, head_dim: int) -> None:
    made = plan(2, num_workers, {"head_dim": head_dim}, max_seqs=max_seqs)
    for shape, combine in zip(made.shapes, made.combine, strict=True):
        ends = [0, *(end for _, end in combine.ranges)]
        assert [begin for begin, _ in combine.ranges] == ends[:-1] and ends[-1] == shape.num_q * shape.slices
        assert combine.first_worker == 0 and combine.num_tasks <= num_workers


def test_more_rows_are_combined_by_more_tasks() -> None:
    """As long as there are workers, until each task has one slice of 32 elements of a head."""

    def count(num_workers: int, max_seqs: int) -> int:
        return plan(2, num_workers, {"head_dim": 128}, max_seqs=max_seqs).combine[1].num_tasks

    assert [count(1000, max_seqs) for max_seqs in (1, 2, 4, 16)] == [3, 6, 12, 12], "three heads of four slices each"
    assert [count(num_workers, 16) for num_workers in (1, 5, 11)] == [1, 5, 11]


@pytest.mark.parametrize(
    ("changes", "launch", "fuses"),
    [
        ({"head_dim": 64}, "spread", True),
        ({"head_dim": 128, "num_heads": 64}, "spread", True),
        ({"head_dim": 128, "num_heads": 66}, "spread", False),  # 4224 columns a rank
        ({"head_dim": 80}, "spread", False),
        ({"head_dim": 64, "num_layers": 1}, "spread", False),
        ({"head_dim": 64}, "massive", False),
    ],
)
def test_when_the_combine_is_fused(changes: dict[str, int], launch: Literal["massive", "spread"], fuses: bool) -> None:
    """Where the o projection can; the combine tasks then go to workers without a part of a single row's attention."""
    made = plan(2, 7, {"num_kv_heads": 2, **changes}, max_seqs=1, attention_launch=launch)
    assert made.fuses_combine == fuses
    for combine in made.combine:
        assert combine.first_worker == (7 - combine.num_tasks if fuses else 0)


def shares(num_heads: int, max_seqs: int, max_model_len: int = 64) -> tuple[list[int], list[int]]:
    """Rows of qkv of each of 20 workers, in a model with one KV head, whose attention of one sequence occupies the first eight
    workers; and the workers of the combine tasks.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 256}
    made = plan(1, 20, sizes, max_seqs=max_seqs, max_model_len=max_model_len, attention_launch="spread")
    ranges = made.qkv[0].ranges
    ends = [0, *(end for _, end in ranges)]
    assert [begin for begin, _ in ranges] == ends[:-1] and ends[-1] == 64 * (num_heads + 2), "rows left out, or twice"
    return [end - begin for begin, end in ranges], [worker for worker, _ in made.combine[0].by_worker()]


def test_reduced_shares_of_qkv() -> None:
    """Workers that run the only sequence's attention get fewer rows, and the combine tasks. If several sequences may come, or a
    long one, all workers have attention; if rows are few, all get as many.
    """
    rows, combine = shares(12, max_seqs=1)
    assert len(rows) == 20 and set(rows[:8]) == {32} and set(rows[8:]) == {52, 54}
    assert combine == [2, 3, 4, 5, 6, 7]
    longest = 2 * COMBINE_WIDTH * POSITIONS_PER_PASS
    assert shares(12, max_seqs=1, max_model_len=longest) == (rows, combine)
    others = [({"max_seqs": 2}, {44, 46}), ({"max_seqs": 1, "max_model_len": longest + 1}, {44, 46})]
    for options, even in others:
        rows, combine = shares(12, **options)
        assert set(rows) == even and combine == [*range(20 - len(combine), 20)], options
    rows, combine = shares(8, max_seqs=1)
    assert set(rows) == {32} and combine == [16, 17, 18, 19]


JOBS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 1152, "intermediate_size": 1024}


@pytest.mark.parametrize(
    ("num_ranks", "changes", "options", "num_reserved"),
    [
        (2, {}, {}, COMBINE_WIDTH),  # one KV head a rank
        (2, {}, {"num_reserved": 3}, 3),
        (2, {"num_layers": 2}, {}, 0),  # the MLP's buffer does not rotate
        (2, {"intermediate_size": 64}, {}, 0),  # fewer MLP tasks than workers, which then may not poll
        (2, {}, {"attention_launch": "massive"}, 0),
        (1, {}, {}, 0),
        (1, {}, {"loopback": True, "num_reserved": 5}, 5),
        (1, {}, {"loopback": True}, 0),  # two KV heads: 16 of 30 workers
    ],
)
def test_workers_reserved_for_attention(
    num_ranks: int, changes: dict[str, int], options: dict[str, Any], num_reserved: int
) -> None:
    """They get no rows of qkv and o, but all of the other matrices."""
    sizes = {**JOBS, "num_layers": 3, **changes}
    made = plan(num_ranks, 30, sizes, **{"max_seqs": 1, "attention_launch": "spread", **options})
    assert made.roles.num_reserved == num_reserved
    for partition in (*made.qkv, made.o):
        assert partition.first_worker == num_reserved and partition.num_tasks <= 30 - num_reserved
    assert made.down.first_worker == 0 and all(mlp.first_worker == 0 for mlp in made.mlp)
    assert num_reserved or made.o == made.down, "a worker would add to columns that another one wrote"


def test_workers_that_poll_have_every_matrix() -> None:
    made = plan(2, 30, {**JOBS, "intermediate_size": 64, "num_layers": 3}, max_seqs=1, attention_launch="spread")
    for rank in made.ranks:
        fewest = min(made.qkv[rank].num_tasks, made.mlp[rank].num_tasks, made.o.num_tasks)
        assert 0 < made.roles.num_polling[rank] == fewest < 30
        assert made.may_poll(rank, fewest - 1) and not made.may_poll(rank, fewest)
        assert not made.attention_may_poll(rank), "every worker has a share of it"


@pytest.mark.parametrize(
    ("num_workers", "num_reserved"), [(3 * COMBINE_WIDTH - 1, 0), (3 * COMBINE_WIDTH, COMBINE_WIDTH)]
)
def test_at_most_a_third_of_the_workers_is_reserved(num_workers: int, num_reserved: int) -> None:
    made = plan(2, num_workers, {**JOBS, "num_layers": 3}, max_seqs=1, attention_launch="spread")
    assert made.roles.num_reserved == num_reserved


@pytest.mark.parametrize(
    ("preset", "num_ranks", "num_reserved"),
    [
        ("qwen3-8b", 1, 0),
        ("qwen3-8b", 2, 32),  # 96 workers would have 437 KB each
        ("qwen3-8b", 4, 36),  # 96 workers with a tile of qkv and three of o
        ("qwen3-8b", 8, 44),  # a third
        ("qwen3-32b", 4, 16),  # 107 workers would have 441 KB each
    ],
)
def test_workers_that_qkv_and_o_can_spare(preset: str, num_ranks: int, num_reserved: int) -> None:
    """On GPUs. No worker gets another tile by it, and combine tasks are on reserved workers."""
    options = DecodeOptions(num_ranks, 132, max_seqs=16, attention_launch="spread", tiled=True)
    made = plan_work(build_model(PRESETS[preset]), options)
    untiled = plan_work(build_model(PRESETS[preset]), dataclasses.replace(options, tiled=False))
    assert made.roles.num_reserved == num_reserved
    assert untiled.roles.num_reserved == (single_row_workers(made.shapes) if num_reserved else 0)
    for spared, even in ((made.qkv[0], untiled.qkv[0]), (made.o, untiled.o)):
        most = [max(math.ceil((end - begin) / M_TILE) for begin, end in each.ranges) for each in (spared, even)]
        assert most[0] == most[1] and sum(end - begin for begin, end in spared.ranges) == even.ranges[-1][1]
    if (preset, num_ranks) in (("qwen3-8b", 4), ("qwen3-8b", 8)):
        assert all(combine.first_worker == 0 and combine.num_tasks <= num_reserved for combine in made.combine)
