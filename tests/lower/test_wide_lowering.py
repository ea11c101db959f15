"""The graph of wide iterations: its tasks, what it has in common with the narrow graph, and that `check` proves its program."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.mutate_spread import same_task
from support.programs import complaint, refusal
from support.tiny_config import tiny_config

from distmk.abi import MAX_ROWS, WIDE_ROWS, LaunchKind, Space, WideEpilogue
from distmk.check import check
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, Lowered, lower_narrow, lower_wide
from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS
from distmk.models import build_model
from distmk.program.program import Program, RankProgram, compile_graph, decode_args
from distmk.tasks import WideLinear, WideSum
from distmk.tasks.wide_linear import SlabPartition

CONFIGS = {
    "qwen3": tiny_config("qwen3-0.6b"),
    "llama": tiny_config(),
    "qwen2": tiny_config(qkv_bias=True, tie_embeddings=True),
    "every bias": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True, num_heads=4, num_kv_heads=2, head_dim=64),
}
WAITS_OF_A_TASK = 2  # of a wide one


def lowered(num_ranks: int, num_workers: int, config: ModelConfig, **options: Any) -> tuple[Lowered, Graph]:
    model = build_model(config)
    made = DecodeOptions(num_ranks, num_workers, max_model_len=64, **{"row_buckets": (WIDE_ROWS,), **options})
    narrow = lower_narrow(model, made)
    return narrow, lower_wide(model, narrow.plan, narrow.graph, narrow.buffers, len(made.row_buckets) - 1)[0]


def wide_program(num_ranks: int = 2) -> Program:
    config = tiny_config("qwen3-0.6b", num_layers=1)
    return compile_graph(lowered(num_ranks, 2, config, tiled=True)[1])


def test_tasks_in_order() -> None:
    _, graph = lowered(2, 3, CONFIGS["qwen3"])
    layer = ["qkv", "append", "attention", "o", "o.reduce", "gate_up", "down", "down.reduce"]
    names = ["scheduler_step", "embed", "embed.reduce", *(f"layer{i}.{name}" for i in range(2) for name in layer)]
    names += ["select_rows", "head", "argmax_rows"]
    behind = ["count_tokens", "sample_row", "sample"]
    ops = [list(dict.fromkeys(task.op for task in graph.tasks if task.rank == rank)) for rank in (0, 1)]
    assert ops == [names + behind, [*names[1:], "send_logits", "sample"]]
    wide = [task for task in graph.tasks if task.op in names[1:]]
    assert all(task.launch is LaunchKind.SPREAD and task.runs_shares for task in wide)
    assert len({(task.rank, task.op) for task in wide}) == len(wide)
    assert {getattr(task, "batch").buffer for task in graph.tasks} == {graph.batch}  # noqa: B009


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("row_buckets", [(WIDE_ROWS,), (MAX_ROWS, WIDE_ROWS)], ids=str)
@pytest.mark.parametrize("max_seqs", [MAX_ROWS, MAX_ROWS + 1])
def test_what_the_narrow_graph_has_is_used_in_place(
    max_seqs: int, row_buckets: tuple[int, ...], num_ranks: int, config: ModelConfig
) -> None:
    """Programs that take turns have both batches, each in the graph whose scheduler step begins; `sampled` each its own. What is
    there for each sampled row is in place if a wide iteration samples no more of them.
    """
    narrow, graph = lowered(num_ranks, 3, config, row_buckets=row_buckets, max_seqs=max_seqs)
    assert set(graph.weights) == set(narrow.graph.weights) and len(graph.weights) == len(narrow.graph.weights)
    buffers = narrow.buffers
    sampling = {getattr(buffers.sampling, field.name) for field in dataclasses.fields(buffers.sampling)}
    by_row = {buffers.candidates, *sampling} - {getattr(buffers.sampling, name) for name in ("slots", "counts", "mask")}
    caches = {cache for pair in buffers.caches for cache in pair}
    batches = set(buffers.batches)
    shared = {buffers.page_table, buffers.state, buffers.candidates, *sampling, *caches, *batches}
    shared -= by_row if max_seqs > MAX_ROWS else set()
    assert shared == set(graph.buffers) & set(narrow.graph.buffers)
    own = [buffer for buffer in graph.buffers if buffer not in shared]
    assert not any(buffer.lamport for buffer in own)
    assert graph.batch and graph.batch.name == f"batch{WIDE_ROWS}"
    peers_write = {"wide_normalized", "wide_parts"} if num_ranks > 1 else set()
    peers_write |= {f"sampled{WIDE_ROWS}"}
    peers_write |= {"wide_logits"} if max_seqs > MAX_ROWS else set()
    assert {buffer.name for buffer in own if buffer.space is Space.HEAP} == peers_write
    assert not {buffer.name for buffer in own} & {buffer.name for buffer in narrow.graph.buffers}
    assert (graph.num_workers, graph.num_schedulers) == (narrow.graph.num_workers, narrow.graph.num_schedulers)


def test_a_graph_shares_each_thing_once() -> None:
    first, second = Graph(1), Graph(1)
    x, other = first.buffer("x", 4), second.buffer("other", 4)
    assert second.share(x) is second.share(x) is x and second.buffers == [other, x]
    with pytest.raises(UsageError, match="buffer x is there already"):
        second.buffer("x", 8)
    with pytest.raises(UsageError, match="buffer other is there already"):
        first.buffer("other", 4)
        first.share(other)


@pytest.mark.parametrize("tiled", [False, True])
def test_operands(tiled: bool) -> None:
    """Slabs, biases and slots of the row-parallel products, and the sums that they are read by."""
    narrow, graph = lowered(2, 5, CONFIGS["every bias"], tiled=tiled, max_seqs=1, attention_launch="spread")
    linears = [task for task in graph.tasks if isinstance(task, WideLinear)]
    for task in linears:
        ranges = {other.slab[1:] for other in narrow.graph.tasks if (other.rank, other.op) == (task.rank, task.op)}  # type: ignore[attr-defined]
        assert sorted(ranges) == list(task.partition.ranges()) and task.tiled == tiled
        tiling = task.slab.weight.tiling
        assert not tiling or SlabPartition.of(tiling.slabs) == task.partition
    parts = [task for task in linears if task.epilogue is WideEpilogue.PARTS]
    splits = 2 if tiled else 1
    assert {task.num_splits for task in parts if task.op == "layer0.o"} == {splits if tiled else 1}
    assert [bool(task.bias) for task in parts] == [task.rank == 0 for task in parts]
    for task in parts:
        sums = [each for each in graph.tasks if isinstance(each, WideSum) and each.op == f"{task.op}.reduce"]
        assert [each.rank for each in sums] == [0, 1] and {each.num_splits for each in sums} == {task.num_splits}
        assert task.out.begin == task.slot * 96 and task.out.buffer is sums[0].parts.buffer
    first, *rest = (each for each in graph.tasks if isinstance(each, WideSum) and each.rank == 0)
    assert not first.add and first.num_splits == 1 and all(each.add for each in rest)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_accepted(num_ranks: int, tiled: bool, config: ModelConfig) -> None:
    for num_workers in (1, 4, 20):
        _, graph = lowered(num_ranks, num_workers, config, tiled=tiled)
        program = compile_graph(graph)
        check(program)
        for part in program.ranks:
            wide = [desc for desc in part.tasks if desc.launch == LaunchKind.SPREAD]
            assert max(desc.num_waits for desc in wide) <= WAITS_OF_A_TASK


def test_large_programs_have_few_waits() -> None:
    """The scheduler step waits for the sampled rows alone, not for every spread task."""
    _, graph = lowered(2, 132, PRESETS["qwen3-8b"], tiled=True)
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
    for number in range(len(waits(wide_program(num_ranks)))):
        program = wide_program(num_ranks)
        part, desc, index = waits(program)[number]
        last = desc.wait_begin + desc.num_waits - 1
        part.waits[index] = type(part.waits[last]).from_buffer_copy(part.waits[last])
        for copy in same_task(part, desc):
            copy.num_waits -= 1
        assert complaint(program), f"wait {index} of task {desc.order} on rank {part.header.rank}"


def test_every_rank_counts() -> None:
    """An event without the trigger of one of its ranks, and the waits with counts to match."""
    num_seen = 0
    for number in range(len(wide_program().ranks[1].triggers)):
        program = wide_program()
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
    "name", ["x", "normalized", "parts", "qkv", "q", "attention_out", "mlp_hidden", "sampled_x", "batch"]
)
def test_smaller_buffers_are_refused(name: str) -> None:
    program = wide_program()
    pieces = program.placement.pieces
    small = next(
        piece for piece in pieces if piece.name == (f"batch{WIDE_ROWS}" if name == "batch" else f"wide_{name}")
    )
    less = dataclasses.replace(small, row_bytes=small.row_bytes - 16)
    program.placement = dataclasses.replace(program.placement, pieces=tuple(less if p is small else p for p in pieces))
    assert "bounds: " in refusal(program)


@pytest.mark.parametrize("field", ["num_rows", "k", "num_splits", "slot", "out_stride", "sampled", "num_reduced"])
def test_damaged_products_are_refused(field: str) -> None:
    program = wide_program()
    part = program.ranks[1]
    for desc, name in zip(part.tasks, part.task_names, strict=True):
        if name == "layer0.down":
            args = decode_args(desc)
            setattr(args, field, getattr(args, field) + (64 if field == "num_reduced" else 1))
    assert complaint(program)


def test_columns_of_gated_activations_are_proved() -> None:
    program = wide_program()
    for desc, name in zip(program.ranks[1].tasks, program.ranks[1].task_names, strict=True):
        if name == "layer0.gate_up":
            decode_args(desc).out_stride += 1
    assert "has not as many columns as gate and up have rows" in refusal(program)


def test_rows_of_two_owners_are_not_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without owners, two ranks' writes of the normalized rows are a race; with the same owner, too."""
    program = wide_program()
    check(program)
    known = WideSum.accesses
    for owner in (None, 0):
        monkeypatch.setattr(
            WideSum,
            "accesses",
            lambda *args, owner=owner: [a._replace(owner=None if a.owner is None else owner) for a in known(*args)],
        )
        assert "race: embed.reduce" in refusal(program) and "wide_normalized" in refusal(program)


def test_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"row_buckets is \(512,\); across hosts an iteration carries 16 rows"):
        lowered(2, 2, CONFIGS["llama"], host_sizes=(1, 1))
