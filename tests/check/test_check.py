"""`check` against a slow oracle, on programs of models and graphs, damaged and random ones."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import graphs
from support.mutate import Mutator
from support.oracle import Oracle
from support.programs import SMALLEST, complaint, find, model_graph, refusal

from distmk.check import Verdict, _check_size, check
from distmk.check.findings import Findings
from distmk.errors import UsageError
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.presets import PRESETS
from distmk.models import build_model
from distmk.program.program import Program, compile_graph, decode_args

NUM_MUTATIONS = 400
NUM_RANDOM_GRAPHS = 300


@pytest.mark.parametrize("shape", list(graphs.SHAPES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_accepts_small_programs(shape: str, num_ranks: int) -> None:
    for num_workers in (1, 2, 3, 7):
        program = compile_graph(graphs.SHAPES[shape](num_ranks, num_workers))
        verdict = check(program)
        assert isinstance(verdict, Verdict)
        assert verdict.num_tasks == len({desc.order for part in program.ranks for desc in part.tasks})
        assert not Oracle(program).faults


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_accepts_models(num_ranks: int) -> None:
    for num_workers in (1, 2, 5, 16):
        check(
            compile_graph(
                model_graph(num_ranks, num_workers, dataclasses.replace(SMALLEST, num_layers=3, hidden_size=256))
            )
        )
    check(compile_graph(model_graph(num_ranks, 4, PRESETS["smollm2-135m"])))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_oracle_accepts_models(num_ranks: int) -> None:
    assert not Oracle(compile_graph(model_graph(num_ranks, 2))).faults


def mutated(draw: int) -> tuple[Program, str]:
    """A program with random damage, and what it is."""
    random_ = random.Random(draw)
    if random_.random() < 0.03:
        num_ranks, name = random_.randint(1, 2), "model"
        graph = model_graph(num_ranks, 2)
    else:
        num_ranks, num_workers, name = random_.randint(1, 4), random_.randint(1, 4), random_.choice(list(graphs.SHAPES))
        graph = graphs.SHAPES[name](num_ranks, num_workers)
    program = compile_graph(graph)
    did = Mutator(program, random_).mutate()
    return program, f"{name} on {num_ranks} ranks, {did}"


def test_mutations() -> None:
    """Damage is refused if it changes the meaning, and accepted if it is harmless; the oracle decides which.

    DISTMK_TEST_DRAW=7 python -m pytest -q tests/check/test_check.py -k mutations     # repeats a draw
    """
    repeated = os.environ.get("DISTMK_TEST_DRAW")
    draws = [int(repeated)] if repeated else [random.SystemRandom().randrange(2**32) for _ in range(NUM_MUTATIONS)]
    seen: collections.Counter[str] = collections.Counter()
    for draw in draws:
        program, did = mutated(draw)
        faults, text = Oracle(program).faults, complaint(program)
        if bool(text) != bool(faults) or "the program cannot be read" in text:
            # The draw comes first, as summaries are cut.
            pytest.fail(f"draw {draw}: {did}: oracle {sorted(faults)}, check {text!r}")
        seen.update(["caught" if faults else "harmless", *faults])
    print(dict(seen))
    assert repeated or (seen["caught"] > NUM_MUTATIONS // 2 and seen["harmless"] and seen["race"])


def test_random_graphs() -> None:
    """The events derived for random graphs are correct, by `check` and by the oracle."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    num_proved = 0
    for _ in range(NUM_RANDOM_GRAPHS):
        draw = source.randrange(2**32)
        graph = graphs.random_graph(random.Random(draw))
        try:
            program = compile_graph(graph)
        except UsageError as error:
            assert "read it in between" in str(error), f"draw {draw}"
            continue
        assert not Oracle(program).faults, f"seed {seed} draw {draw}"
        text = complaint(program)
        assert not text, f"seed {seed} draw {draw}: {text}"
        num_proved += 1
    assert num_proved > NUM_RANDOM_GRAPHS // 2


@pytest.mark.parametrize(("num_layers", "fits"), [(80, True), (800, False)])
def test_programs_that_are_too_large(num_layers: int, fits: bool) -> None:
    """The largest model of the presets fits, on eight ranks of 132 workers; what would take all memory is refused."""
    num_tasks = num_layers * 8 * (6 * 132 + 1)
    worker = np.where(np.arange(num_tasks) < num_layers * 8, -1, 0)  # attention is in no single worker's list
    tables: Any = SimpleNamespace(
        num_ranks=8, num_workers=132, num_tasks=num_tasks, tasks=SimpleNamespace(worker=worker)
    )
    findings = Findings()
    _check_size(tables, findings)
    assert (findings.count == 0) == fits and all("too many to be proved" in line for line in findings.lines)


def test_random_bytes_are_refused() -> None:
    """With any bytes in the arrays, `check` raises a CheckError, or accepts a change without meaning."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(300):
        program = compile_graph(graphs.handed_out(2, 2))
        part = source.choice(program.ranks)
        target = source.choice([part.header, part.tasks, part.waits, part.triggers, part.queues, part.launches])
        at = source.randrange(ctypes.sizeof(target))
        value = source.choice([0x00, 0x7F, 0xFF, source.randrange(256)])
        ctypes.memset(ctypes.addressof(target) + at, value, min(source.choice([1, 4, 8]), ctypes.sizeof(target) - at))
        text = complaint(program)
        assert "cannot be read:" not in text.partition("\n")[0], f"seed {seed}: {text}"


def test_absurd_values_are_refused_at_once() -> None:
    program = compile_graph(graphs.all_reduce(2, 1))
    decode_args(find(program, "sum0")).num_blocks = 2**32 - 1
    assert "arguments cannot be read (num_blocks is 4294967295)" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "massive").max_instances = 2**32 - 1
    assert "has 4294967295 instances" in refusal(program)


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("op", ["layer1.attention", "layer1.o"])
def test_a_wrong_length_of_the_fused_combine_is_refused(op: str, more: int) -> None:
    config = dataclasses.replace(SMALLEST, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=64)
    options = DecodeOptions(1, 16, max_seqs=1, max_model_len=64, min_kv_split_len=2, attention_launch="spread")
    program = compile_graph(*lower_programs(build_model(config), options))
    assert not complaint(program)
    for desc, name in zip(program.ranks[0].tasks, program.ranks[0].task_names, strict=True):
        if name == op:
            decode_args(desc).fused_combine_len += more
    assert f"arguments cannot be read (fused_combine_len is {120 + more})" in refusal(program)
