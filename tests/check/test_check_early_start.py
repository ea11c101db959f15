"""Tasks that poll may write before their waits are met: accepted in programs for GPUs, refused where something races."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
from support.lamport import accepted
from support.oracle import Oracle
from support.programs import SMALLEST, complaint, find, model_graph, refusal

from distmk.abi import split_operand
from distmk.backends.defaults import backend_choices
from distmk.check import check
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program.program import Program, compile_graph, decode_args

NUM_DAMAGED = 8


def drawn_config(source: random.Random) -> ModelConfig:
    num_kv, group = source.randint(1, 3), source.randint(1, 3)
    return dataclasses.replace(
        SMALLEST,
        num_layers=source.randint(1, 6),
        hidden_size=source.choice([32, 64, 256, 576, 1024]),
        intermediate_size=source.choice([48, 256, 1536, 3000]),
        num_heads=num_kv * group,
        num_kv_heads=num_kv,
        head_dim=source.choice([8, 32, 64]),
    )


def test_accepts_models_of_gpus() -> None:
    """Models of many shapes, also with workers that run no task of an operator, whose clocks are behind."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(25):
        config, num_workers = drawn_config(source), source.choice([1, 2, 5, 13, 40])
        num_ranks, max_seqs = source.randint(1, min(4, config.num_heads)), source.choice([1, 2, 8])
        num_reserved = source.choice([None, *range(num_workers)])
        options = DecodeOptions(
            num_ranks,
            num_workers,
            max_seqs=max_seqs,
            max_model_len=100,
            num_reserved=num_reserved,
            **backend_choices("cuda"),
        )
        text = complaint(compile_graph(*lower_programs(build_model(config), options)))
        assert not text, f"{config} on {num_ranks} x {num_workers}, {num_reserved} reserved: {text}"


def spread_model(num_ranks: int, num_layers: int, num_reserved: int = 0) -> Program:
    """A model in which every worker runs a task of every operator, so that all tasks poll, but `num_reserved` workers without
    qkv and o.
    """
    config = dataclasses.replace(
        SMALLEST, num_layers=num_layers, hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64
    )
    return compile_graph(model_graph(num_ranks, 2, config, attention_launch="spread", num_reserved=num_reserved))


@pytest.mark.drawn(1)
@pytest.mark.whole
@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_workers_without_a_task_of_o(num_layers: int) -> None:
    """Their clocks are behind when they start the MLP; its tasks poll all the same."""
    program = spread_model(2, num_layers, 1)
    accepted(program)
    part = program.ranks[0]
    names = [
        part.task_names[index] for index in range(part.queues[0].begin, part.queues[0].begin + part.queues[0].count)
    ]
    assert not [name for name in names if name.endswith((".qkv", ".o", ".o.reduce"))]
    for desc, name in zip(part.tasks, part.task_names, strict=True):
        if name.endswith((".gate_up", ".down")):
            assert decode_args(desc).polls_x, name


@pytest.mark.parametrize("num_workers", [2, 5])
def test_every_worker_has_a_task_of_o_in_two_layers(num_workers: int) -> None:
    """With two layers the MLP's vector does not rotate, and a worker without a task of o would not know when it was read."""
    config = dataclasses.replace(
        SMALLEST, hidden_size=256, intermediate_size=256, num_heads=6, num_kv_heads=3, head_dim=64, num_layers=2
    )
    options = DecodeOptions(2, num_workers, max_seqs=1, max_model_len=100, num_reserved=1, **backend_choices("cuda"))
    program = compile_graph(*lower_programs(build_model(config), options))
    assert not complaint(program)
    assert sum(name == "layer0.o" for name in program.ranks[0].task_names) == num_workers


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_tasks_poll(num_ranks: int) -> None:
    program = spread_model(num_ranks, 3)
    accepted(program)
    for op in ("qkv", "attention", "o", "gate_up", "down"):
        args = decode_args(find(program, f"layer1.{op}"))
        assert getattr(args, poll_flag(args)), op
    assert decode_args(find(program, "layer1.combine")).fused_combine_len


def test_a_task_that_starts_before_the_waits_of_the_one_before_it() -> None:
    """A worker may start to combine before the waits of its qkv are met. A worker without a task of qkv then has no order
    with the tasks that read what its earlier combine wrote.
    """
    config = dataclasses.replace(SMALLEST, num_layers=4, num_heads=1, num_kv_heads=1, head_dim=64)
    program = compile_graph(model_graph(1, 2, config, attention_launch="spread"))
    accepted(program)
    for desc, name in zip(program.ranks[0].tasks, program.ranks[0].task_names, strict=True):
        if name.endswith(".combine"):
            args = decode_args(desc)
            assert not args.polls_partials
            type(args).from_buffer(desc.args).polls_partials = 1
    assert Oracle(program).faults >= {"race"}
    text = refusal(program)
    assert "layer1.combine (rank 0, worker 1) in the next iteration writes attention_out" in text
    assert "before its waits are met, and nothing orders it against layer0.o (rank 0, worker 0)" in text


def test_a_task_that_resets_what_others_still_read() -> None:
    """down resets the vector of two rotations ago; the newer one may still be read by gate_up of another worker."""
    program = spread_model(1, 3)
    newer = decode_args(find(program, "layer1.o")).out_bf16
    for desc, name in zip(program.ranks[0].tasks, program.ranks[0].task_names, strict=True):
        if name == "layer1.down":
            type(decode_args(desc)).from_buffer(desc.args).lamport_reset = newer
            break
    assert Oracle(program).faults >= {"race"}
    text = refusal(program)
    assert "layer1.down (rank 0, worker 0) in the next iteration writes x_bf16" in text
    assert "before its waits are met, and nothing orders it against layer1.gate_up (rank 0, worker 1)" in text


def test_a_task_with_too_deep_a_lookahead() -> None:
    """gate_up may start before the waits of the two tasks before it are met. The first o may not: it adds to what the
    embedding wrote, which only the waits of qkv order before it.
    """
    config = dataclasses.replace(
        SMALLEST, num_layers=2, hidden_size=256, intermediate_size=256, num_heads=2, head_dim=64
    )
    program = compile_graph(model_graph(1, 3, config, attention_launch="spread", max_seqs=1))
    accepted(program)
    for name in ("layer0.gate_up", "layer0.o", "layer0.down"):
        assert find(program, name).deep_lookahead == (name == "layer0.gate_up"), name
    for desc, name in zip(program.ranks[0].tasks, program.ranks[0].task_names, strict=True):
        desc.deep_lookahead |= name == "layer0.o"
    assert "arrival" in Oracle(program).faults
    text = refusal(program)
    assert "layer0.o (rank 0, worker 1) in the next iteration may poll x[" in text
    assert "before embed (rank 0, worker 2) in the next iteration has written it" in text


def test_a_task_behind_a_combine_without_work() -> None:
    """With a single row, combine has nothing to do, and the task behind it may start before attention is done and has reset
    its buffer.
    """
    program = spread_model(1, 3)
    reset = decode_args(find(program, "layer1.attention")).lamport_reset
    for desc, name in zip(program.ranks[0].tasks, program.ranks[0].task_names, strict=True):
        if name == "layer1.o":
            type(decode_args(desc)).from_buffer(desc.args).fused_partials = reset
    assert "arrival" in Oracle(program).faults
    text = refusal(program)
    assert "layer1.o (rank 0, worker 0) in the next iteration may poll attention_fused_partials" in text
    assert "before layer1.attention (rank 0, every worker) in the next iteration has reset it" in text


def poll_flag(args: Any) -> str:
    """The argument that says whether a task polls; "": there is none."""
    return next((name for name, *_ in args._fields_ if name.startswith("polls_")), "")


def damage(program: Program, source: random.Random) -> str:
    """Change whether a task polls, its lookahead, or what it resets."""
    part = source.choice(program.ranks)
    early = [desc for desc in part.tasks if poll_flag(decode_args(desc))]
    desc = source.choice(early)
    args = type(decode_args(desc)).from_buffer(desc.args)
    which = source.choice(["polls", "polls", "lamport_reset", "deep_lookahead"])
    if which == "deep_lookahead":
        desc.deep_lookahead ^= 1
        return f"deep_lookahead of a task of type {desc.type} became {desc.deep_lookahead}"
    if which == "polls" or not getattr(args, "lamport_reset", 0):
        flag = poll_flag(args)
        setattr(args, flag, getattr(args, flag) ^ 1)
        return f"{flag} of a task of type {desc.type} became {getattr(args, flag)}"
    others = [decode_args(other) for other in early if other.type == desc.type]
    other = source.choice([other for other in others if other.lamport_reset])
    args.lamport_reset = other.lamport_reset
    return f"a task of type {desc.type} resets {split_operand(args.lamport_reset)}"


@pytest.mark.whole
def test_damage_is_found() -> None:
    """`check` refuses what the oracle refuses, and nothing else."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source, seen = random.Random(seed), collections.Counter[str]()
    while sum(seen.values()) < NUM_DAMAGED or not (seen["race"] + seen["arrival"] and seen["harmless"]):
        program = spread_model(source.randint(1, 2), source.randint(2, 4), source.randint(0, 1))
        did = damage(program, source)
        faults, text = Oracle(program).faults, complaint(program)
        assert bool(text) == bool(faults), f"seed {seed}: {did}: oracle {faults}, check {text!r}"
        seen.update(faults or ["harmless"])
    print(dict(seen))
    check(spread_model(2, 2))
