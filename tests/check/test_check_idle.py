"""A task that may idle (`Task.may_idle`) implies nothing of its waits: random graphs, by both verdicts.

DISTMK_TEST_SEED=7 python -m pytest -q tests/check/test_check_idle.py     # the graphs of one run again
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.oracle import Oracle

from distmk.check import check
from distmk.errors import CheckError, UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Region
from distmk.program.program import Program, compile_graph
from distmk.sync.happens_before import HappensBefore
from distmk.tasks import Affine, Put, Sine

SEED = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
NUM_GRAPHS = 250


@pytest.fixture(autouse=True)
def _affine_may_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Affine, "may_idle", True)


def random_graph(rng: np.random.Generator) -> Graph:
    """Tasks that copy columns of a few buffers; those of type Affine may idle."""
    num_ranks, num_workers = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    graph = Graph(num_ranks, num_workers)
    buffers = [graph.buffer(f"b{i}", 12) for i in range(3)]

    def columns(rank: int, size: int) -> Region:
        begin = int(rng.integers(0, 12 // size)) * size
        return buffers[rng.integers(3)].at(rank, begin, begin + size)

    for index in range(int(rng.integers(3, 8))):
        size, rank = int(rng.choice([4, 6, 12])), int(rng.integers(num_ranks))
        src, dst = columns(rank, size), columns(rank, size)
        while dst.buffer is src.buffer:
            dst = columns(rank, size)
        kind = [Affine, Affine, Sine, Put][rng.integers(4)]
        to = int(rng.integers(num_ranks)) if kind is Put else rank
        worker = int(rng.integers(num_workers))
        graph.add(kind(rank, f"{kind.type_name}{index}", worker, src=src, dst=dst.on(to)))
    return graph


def is_accepted(program: Program) -> bool:
    """The verdict of `check`, with which the oracle agrees."""
    try:
        check(program)
        accepted = True
    except CheckError as error:
        assert "race" in str(error) or "counting" in str(error), error
        accepted = False
    faults = Oracle(program).faults
    assert accepted == (not faults), f"check {'accepts' if accepted else 'refuses'}, and the oracle finds {faults}"
    return accepted


@pytest.mark.whole
def test_waits_that_are_derived_suffice() -> None:
    """And without any one of them check and oracle still agree."""
    print(f"repeat with DISTMK_TEST_SEED={SEED}")
    rng = np.random.default_rng(SEED)
    num_compiled = num_needed = 0
    for _ in range(NUM_GRAPHS):
        try:
            program = compile_graph(random_graph(rng))
        except UsageError:  # what another rank did cannot be known
            continue
        num_compiled += 1
        assert is_accepted(program)
        for part in program.ranks:
            for desc in part.tasks:
                if desc.num_waits and rng.random() < 0.3:
                    desc.num_waits -= 1
                    num_needed += not is_accepted(program)
                    desc.num_waits += 1
    assert num_compiled > NUM_GRAPHS / 2 and num_needed > NUM_GRAPHS / 10


def test_a_read_across_intervals_comes_after_every_writer() -> None:
    """What a task that may idle overwrites may be what is read, also by a task that reads beside it."""
    graph = Graph(1, 4)
    source, data, copy = (graph.buffer(name, 12) for name in ("source", "data", "copy"))
    tasks = [
        (Sine, source, data, 0, 12),
        (Sine, source, data, 6, 12),
        (Affine, source, data, 6, 12),
        (Sine, data, copy, 4, 8),
    ]
    for worker, (kind, src, dst, begin, end) in enumerate(tasks):
        graph.add(kind(0, f"task{worker}", worker, src=src.at(0, begin, end), dst=dst.at(0, begin, end)))
    assert is_accepted(compile_graph(graph))


def test_waits_of_programs_without_idle_tasks_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"repeat with DISTMK_TEST_SEED={SEED}")
    rng = np.random.default_rng(SEED)
    num_refused = 0
    for _ in range(NUM_GRAPHS):
        graph = random_graph(rng)
        with monkeypatch.context() as patched:
            patched.setattr(HappensBefore, "may_idle", lambda *_: False)
            patched.setattr(
                HappensBefore, "_may_idle", property(lambda _: [False] * 100, lambda *_: None), raising=False
            )
            try:
                program = compile_graph(graph)
            except UsageError:
                continue
        num_refused += not is_accepted(program)
    assert num_refused
