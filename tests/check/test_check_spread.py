"""`check` on spread tasks, of which every worker's queue has a copy."""

from __future__ import annotations

import ctypes
import dataclasses
import random

import pytest
from support import graphs
from support.mutate_spread import SpreadMutator, queue_lists, rebuild
from support.oracle import Oracle
from support.programs import copies, find, refusal

from distmk.abi import TASK_ARGS_BYTES, LaunchKind, TaskDesc
from distmk.errors import UsageError
from distmk.program.program import compile_graph
from distmk.tasks import Affine, Nop, Put


def test_every_worker_has_a_copy() -> None:
    """A missing copy, one too many, and one that is not like the others."""
    seen = set()
    for _ in range(40):
        program = compile_graph(graphs.spread(2, 3))
        damage = SpreadMutator(program, random.Random())
        for kind, text in (
            (damage.drop_copy, "0 times, expected once"),
            (damage.double_copy, "2 times, expected once"),
        ):
            program = damage.program = compile_graph(graphs.spread(2, 3))
            assert kind() and text in refusal(program)
        program = damage.program = compile_graph(graphs.spread(2, 3))
        did = damage.change_copy()
        if did:
            assert "spread: " in refusal(program), did
            seen.add(did.split()[1])
    assert seen == set("01234")
    program = compile_graph(graphs.spread(1, 3))
    copies(program, "again")[1].wait_begin += 1  # as many waits, but others
    assert "spread: again (rank 0, every worker) is not the same for all workers" in refusal(program)
    program = compile_graph(graphs.spread(1, 3))
    for copy in copies(program, "again"):
        copy.first_worker = 3
    assert "again (rank 0, every worker) begins at worker 3 of 3" in refusal(program)
    for copy in copies(program, "again"):
        copy.max_instances = 4
    assert "again (rank 0, every worker) has 4 instances for 3 workers, and its body runs one" in refusal(program)


def test_every_copy_counts() -> None:
    """A wait for a spread task is for all workers."""
    program = compile_graph(graphs.spread(1, 3))
    part = program.ranks[0]
    desc = find(program, "between")
    wait = next(w for w in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits] if not w.lag)
    assert wait.count == 3
    wait.count = 1
    assert "between (rank 0, worker 1) waits for 1 of event" in refusal(program)
    assert "which is triggered 3 times an iteration" in refusal(program)


def test_a_copy_in_front_of_its_producer() -> None:
    """Worker 1 would wait for a task that is behind the copy in its own queue."""
    program = compile_graph(graphs.spread(1, 2))
    part = program.ranks[0]
    lists = queue_lists(part)
    names = [[part.task_names[index] for index in queue] for queue in lists]
    assert names == [["first", "spread", "again", "away"], ["spread", "between", "again"]]
    lists[1][1], lists[1][2] = lists[1][2], lists[1][1]
    rebuild(part, lists)
    text = refusal(program)
    assert "cycle: " in text and "again (rank 0, worker 1) -> between (rank 0, worker 1)" in text
    assert Oracle(program).faults == {"deadlock"}


def test_spread_tasks_stay_on_their_rank() -> None:
    """A spread task pushes to no other rank and streams no weights."""
    graph = graphs.ring(2, 2)
    x, y = graph.buffers
    with pytest.raises(UsageError, match="a spread task writes its own rank only"):
        graph.add(Put(0, "far", launch=LaunchKind.SPREAD, src=x.at(0), dst=x.at(1)))
    with pytest.raises(UsageError, match="is spread over all workers; give it no worker"):
        graph.add(Affine(0, "pinned", 1, LaunchKind.SPREAD, src=x.at(0), dst=x.at(0)))
    graphs.push_linear(graph, 0, graph.buffer("halves", x.cols, dtype="bf16").at(0), y.at(0), "linear")
    with pytest.raises(UsageError, match="task linear streams weights, so it cannot be spread"):
        graph.add(dataclasses.replace(graph.tasks[-1], launch=LaunchKind.SPREAD, worker=None))
    for kind in (LaunchKind.SINGLE, LaunchKind.MASSIVE):
        with pytest.raises(UsageError, match="task linear streams weights, which its worker fetches ahead of time"):
            graph.add(dataclasses.replace(graph.tasks[-1], launch=kind, worker=None))
    for task in (graph.tasks[2], graph.tasks[-1]):
        object.__setattr__(task, "launch", LaunchKind.SPREAD)
    program = compile_graph(graph)
    assert "spread: linear (rank 0, every worker) streams weights" in refusal(program)
    for desc in copies(program, "linear"):
        desc.type, desc.max_instances = Nop.type_id, 1
        ctypes.memset(ctypes.addressof(desc) + TaskDesc.args.offset, 0, TASK_ARGS_BYTES)
    assert "spread: send (rank 0, every worker) writes to other ranks" in refusal(program)
