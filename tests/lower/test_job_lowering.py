"""The graph of job iterations: its tasks, what it has in common with the slab graph, and that `check` proves its program."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.mutate_spread import same_task
from support.programs import complaint, refusal
from support.tiny_config import tiny_config

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, Epilogue, LaunchKind, Space
from distmk.check import check
from distmk.errors import UsageError
from distmk.graph.graph import Graph, Memory
from distmk.graph.regions import Segment, WeightKind
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS
from distmk.models import build_model
from distmk.program.program import Program, RankProgram, compile_graph, decode_args
from distmk.tasks import LinearJobs, ReduceRows

CONFIGS = {
    "qwen3": tiny_config("qwen3-0.6b"),
    "llama": tiny_config(),
    "qwen2": tiny_config(qkv_bias=True, tie_embeddings=True),
    "every bias": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True, num_heads=4, num_kv_heads=2, head_dim=64),
}
WAITS_OF_A_TASK = 2  # of one of jobs


def lowered(num_ranks: int, num_workers: int, config: ModelConfig, **options: Any) -> tuple[Graph, ...]:
    made = DecodeOptions(num_ranks, num_workers, max_model_len=64, **{"row_buckets": (MAX_BUCKET_ROWS,), **options})
    return lower_programs(build_model(config), made)


def job_program(num_ranks: int = 2) -> Program:
    config = tiny_config("qwen3-0.6b", num_layers=1)
    return compile_graph(*lowered(num_ranks, 2, config, tiled=True))


def test_tasks_in_order() -> None:
    (graph,) = lowered(2, 3, CONFIGS["qwen3"])
    layer = ["qkv", "append", "attention", "o", "o.reduce", "gate_up", "down", "down.reduce"]
    names = ["scheduler_step", "embed", "embed.reduce", *(f"layer{i}.{name}" for i in range(2) for name in layer)]
    names += ["select_rows", "head", "argmax_rows"]
    behind = ["count_tokens", "sample_row", "sample"]
    ops = [list(dict.fromkeys(task.op for task in graph.tasks if task.rank == rank)) for rank in (0, 1)]
    assert ops == [names + behind, [*names[1:], "send_logits", "sample"]]
    jobs = [task for task in graph.tasks if task.op in names[1:]]
    assert all(task.launch is LaunchKind.SPREAD and task.loops_over_instances for task in jobs)
    assert len({(task.rank, task.op) for task in jobs}) == len(jobs)
    assert {getattr(task, "batch").buffer for task in graph.tasks} == {graph.batch}  # noqa: B009


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("max_seqs", [MAX_ROWS, MAX_ROWS + 1])
def test_what_programs_share(max_seqs: int, num_ranks: int, config: ModelConfig) -> None:
    """All weights, what outlives an iteration, and the batches; what is there for each sampled row if as many rows are sampled.

    Two programs of jobs share their activations, too. Every program has `sampled` for itself.
    """
    buckets = (MAX_ROWS, 100, MAX_BUCKET_ROWS)
    slabs, *of_jobs = lowered(num_ranks, 3, config, row_buckets=buckets, max_seqs=max_seqs)
    of_slabs, *names = [{buffer.name for buffer in graph.buffers} for graph in (slabs, *of_jobs)]
    by_row = {
        f"{kind}{MAX_ROWS}" for kind in ("logits", "adjusted_logits", "token_masks", "drawn", "logprobs", "candidates")
    }
    lasting = {"page_table", "batcher", "slot_sampling", "token_counts"}
    caches = {f"{kind}_cache{layer}" for kind in "kv" for layer in range(config.num_layers)}
    shared = lasting | caches | {f"batch{rows}" for rows in buckets} | (by_row if max_seqs == MAX_ROWS else set())
    for rows, graph, named in zip(buckets[1:], of_jobs, names, strict=True):
        assert set(graph.weights) == set(slabs.weights) and len(graph.weights) == len(slabs.weights)
        assert {buffer.name for buffer in set(graph.buffers) & set(slabs.buffers)} == shared == of_slabs & named
        own = [buffer for buffer in graph.buffers if buffer.name not in shared]
        assert not any(buffer.lamport for buffer in own)
        assert graph.batch and graph.batch.name == f"batch{rows}"
        peers_write = {"job_normalized_x", "job_parts"} if num_ranks > 1 else set()
        peers_write |= {f"sampled{rows}"} | ({f"logits{max_seqs}"} if max_seqs > MAX_ROWS else set())
        assert {buffer.name for buffer in own if buffer.space is Space.HEAP} == peers_write
    small, large = of_jobs
    assert {buffer.name for buffer in set(large.buffers) ^ set(small.buffers)} == {
        "sampled100",
        f"sampled{MAX_BUCKET_ROWS}",
    }


def test_the_same_name_is_the_same_memory() -> None:
    memory = Memory()
    first, second, alone = Graph(1, memory=memory), Graph(1, memory=memory), Graph(1)
    x = first.buffer("x", 4)
    assert second.buffer("x", 4) is x and alone.buffer("x", 4) is not x
    vector = ([Segment("t", 0, 4)], WeightKind.VECTOR)
    weight = first.weight("w", 0, 1, *vector)
    assert second.weight("w", 0, 1, *vector) is second.weight("w", 0, 1, *vector) is weight
    assert second.weights == [weight]
    first.buffer("y", 8)
    first.buffer("z", 8, lamport=True)
    with pytest.raises(UsageError, match="buffer z is a Lamport buffer, and another program has one of that name"):
        second.buffer("z", 8, lamport=True)
    with pytest.raises(UsageError, match="buffer y is there already, and different, in another program"):
        second.buffer("y", 4)
    with pytest.raises(UsageError, match="buffer x is there already; give it another name"):
        second.buffer("x", 4)
    with pytest.raises(UsageError, match="two weights of rank 0 are called w"):
        first.weight("w", 0, 1, *vector, scale=2.0)


@pytest.mark.parametrize("tiled", [False, True])
def test_operands(tiled: bool) -> None:
    """Slabs, biases and parts of the row-parallel products, and the sums that they are read by."""
    options = {"tiled": tiled, "max_seqs": 1, "attention_launch": "spread", "row_buckets": (MAX_ROWS, MAX_BUCKET_ROWS)}
    slabs, graph = lowered(2, 5, CONFIGS["every bias"], **options)
    linears = [task for task in graph.tasks if isinstance(task, LinearJobs)]
    for task in linears:
        ranges = {other.slab[1:] for other in slabs.tasks if (other.rank, other.op) == (task.rank, task.op)}  # type: ignore[attr-defined]
        assert sorted(ranges) == list(task.partition.ranges) and task.tiled == tiled
        tiling = task.slab.weight.tiling
        assert not tiling or tiling.slabs == task.partition.ranges
    parts = [task for task in linears if task.epilogue is Epilogue.PARTS]
    splits = 2 if tiled else 1
    assert {task.num_k_splits for task in parts if task.op == "layer0.o"} == {splits if tiled else 1}
    assert [bool(task.bias) for task in parts] == [task.rank == 0 for task in parts]
    for task in parts:
        sums = [each for each in graph.tasks if isinstance(each, ReduceRows) and each.op == f"{task.op}.reduce"]
        assert [each.rank for each in sums] == [0, 1] and {each.num_k_splits for each in sums} == {task.num_k_splits}
        assert task.out.begin == task.first_part * 96 and task.out.buffer is sums[0].parts.buffer
    first, *rest = (each for each in graph.tasks if isinstance(each, ReduceRows) and each.rank == 0)
    assert not first.accumulates and first.num_k_splits == 1 and all(each.accumulates for each in rest)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_accepted(num_ranks: int, tiled: bool, config: ModelConfig) -> None:
    for num_workers in (1, 4, 20):
        (graph,) = lowered(num_ranks, num_workers, config, tiled=tiled)
        program = compile_graph(graph)
        check(program)
        for part in program.ranks:
            jobs = [desc for desc in part.tasks if desc.launch == LaunchKind.SPREAD]
            assert max(desc.num_waits for desc in jobs) <= WAITS_OF_A_TASK


def test_large_programs_have_few_waits() -> None:
    """The scheduler step waits for the sampled rows alone, not for every spread task."""
    (graph,) = lowered(2, 132, PRESETS["qwen3-8b"], tiled=True)
    program = compile_graph(graph)
    verdict = check(program)
    part = program.ranks[0]
    step = next(desc for desc in part.tasks if desc.launch == LaunchKind.SCHEDULER)
    assert step.num_waits <= 2 + MAX_ROWS and verdict.num_waits < 3 * verdict.num_tasks


def waits(program: Program) -> list[tuple[RankProgram, Any, int]]:
    """The waits of spread tasks: a descriptor and an index in the section."""
    found = []
    for part in program.ranks:
        first = {desc.order: desc for desc in reversed(part.tasks) if desc.launch == LaunchKind.SPREAD}
        for desc in first.values():
            found += [(part, desc, desc.wait_begin + i) for i in range(desc.num_waits)]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_wait_may_be_dropped(num_ranks: int) -> None:
    for number in range(len(waits(job_program(num_ranks)))):
        program = job_program(num_ranks)
        part, desc, index = waits(program)[number]
        last = desc.wait_begin + desc.num_waits - 1
        part.waits[index] = type(part.waits[last]).from_buffer_copy(part.waits[last])
        for copy in same_task(part, desc):
            copy.num_waits -= 1
        assert complaint(program), f"wait {index} of task {desc.order} on rank {part.header.rank}"


def test_every_rank_counts() -> None:
    """An event without the trigger of one of its ranks, and the waits with counts to match."""
    num_seen = 0
    for number in range(len(job_program().ranks[1].triggers)):
        program = job_program()
        part = program.ranks[1]
        trigger = part.triggers[number]
        if not any(wait.event == trigger.event and wait.count > 2 for wait in program.ranks[trigger.rank].waits):
            continue  # an event of one task, by its two workers
        for wait in program.ranks[trigger.rank].waits:
            if wait.event == trigger.event:
                wait.count -= 2
        trigger.amount = 0
        assert complaint(program), f"trigger {number}"
        num_seen += 1
    assert num_seen >= 8


@pytest.mark.parametrize(
    "name", ["x", "normalized_x", "parts", "qkv", "q", "attention_out", "mlp_hidden", "sampled_x", "batch"]
)
def test_smaller_buffers_are_refused(name: str) -> None:
    program = job_program()
    pieces = program.placement.pieces
    small = next(
        piece for piece in pieces if piece.name == (f"batch{MAX_BUCKET_ROWS}" if name == "batch" else f"job_{name}")
    )
    less = dataclasses.replace(small, row_bytes=small.row_bytes - 16)
    program.placement = dataclasses.replace(program.placement, pieces=tuple(less if p is small else p for p in pieces))
    assert "bounds: " in refusal(program)


@pytest.mark.parametrize(
    "field", ["num_rows", "k", "num_k_splits", "first_part", "out_stride", "max_sampled_rows", "num_reduced"]
)
def test_damaged_products_are_refused(field: str) -> None:
    program = job_program()
    part = program.ranks[1]
    for desc, name in zip(part.tasks, part.task_names, strict=True):
        if name == "layer0.down":
            args = decode_args(desc)
            setattr(args, field, getattr(args, field) + (64 if field == "num_reduced" else 1))
    assert complaint(program)


def test_columns_of_gated_activations_are_proved() -> None:
    program = job_program()
    for desc, name in zip(program.ranks[1].tasks, program.ranks[1].task_names, strict=True):
        if name == "layer0.gate_up":
            decode_args(desc).out_stride += 1
    assert "has not as many columns as gate and up have rows" in refusal(program)


def test_rows_of_two_owners_are_not_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without owners, two ranks' writes of the normalized rows are a race; with the same owner, too."""
    program = job_program()
    check(program)
    known = ReduceRows.accesses
    for owner in (None, 0):
        monkeypatch.setattr(
            ReduceRows,
            "accesses",
            lambda *args, owner=owner: [a._replace(owner=None if a.owner is None else owner) for a in known(*args)],
        )
        assert "race: embed.reduce" in refusal(program) and "job_normalized_x" in refusal(program)


def test_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"row_buckets is \(512,\); across hosts an iteration carries 16 rows"):
        lowered(2, 2, CONFIGS["llama"], host_sizes=(1, 1))
