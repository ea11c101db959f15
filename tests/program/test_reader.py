"""The flat arrays of a program against a plain walk over its structures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from support import graphs
from support.programs import model_graph

from distmk.abi import LaunchKind
from distmk.graph.graph import Graph
from distmk.program.program import Program, compile_graph
from distmk.program.reader import ProgramTables, read_tables

Key = tuple[int, int, int]  # rank, order, and worker of a copy (-1 where copies are merged)


def keys_of(program: Program, merge_copies: bool) -> list[list[Key]]:
    """By rank: the task of each descriptor."""
    found = []
    for rank, part in enumerate(program.ranks):
        worker = {
            index: number
            for number, queue in enumerate(part.queues)
            for index in range(queue.begin, queue.begin + queue.count)
        }
        found.append(
            [
                (rank, desc.order, -1 if merge_copies or desc.launch != LaunchKind.SPREAD else worker[index])
                for index, desc in enumerate(part.tasks)
            ]
        )
    return found


def walked(program: Program, merge_copies: bool) -> tuple[Counter, Counter]:
    """Waits (task, event and its rank, count, lag) and triggers (task, event and its rank, amount)."""
    waits, triggers, seen = Counter(), Counter(), set()
    for rank, (part, keys) in enumerate(zip(program.ranks, keys_of(program, merge_copies), strict=True)):
        for desc, key in zip(part.tasks, keys, strict=True):
            if key in seen:
                continue
            seen.add(key)
            for wait in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits]:
                waits[key, rank, wait.event, wait.count, wait.lag] += 1
            for trigger in part.triggers[desc.trigger_begin : desc.trigger_begin + desc.num_triggers]:
                triggers[key, trigger.rank, trigger.event, trigger.amount] += 1
    return waits, triggers


def decoded(tables: ProgramTables, keys: list[Key]) -> tuple[Counter, Counter]:
    def place(event: int) -> tuple[int, int]:
        rank = int(tables.event_rank[event])
        return rank, event - int(tables.first_event[rank])

    waits, triggers = tables.waits, tables.triggers
    columns = (waits.task, waits.event, waits.count, waits.lag)
    found = Counter(
        (keys[task], *place(event), count, lag) for task, event, count, lag in np.stack(columns, 1).tolist()
    )
    columns = (triggers.task, triggers.event, triggers.amount)
    return found, Counter((keys[task], *place(event), amount) for task, event, amount in np.stack(columns, 1).tolist())


@pytest.mark.parametrize("merge_copies", [True, False])
@pytest.mark.parametrize("shape", [*graphs.SHAPES.values(), model_graph])
def test_tables_are_what_the_bytes_say(shape: Callable[[int, int], Graph], merge_copies: bool) -> None:
    for num_ranks, num_workers in ((1, 1), (2, 3), (3, 2)):
        program = compile_graph(shape(num_ranks, num_workers))
        tables, by_rank = read_tables(program, merge_copies=merge_copies), keys_of(program, merge_copies)
        keys: list[Key] = list(dict.fromkeys(key for keys in by_rank for key in keys))
        assert (tables.num_tasks, tables.num_ranks, tables.num_workers) == (len(keys), num_ranks, num_workers)
        assert decoded(tables, keys) == walked(program, merge_copies)
        for rank, part in enumerate(program.ranks):
            assert [keys[task] for task in tables.task_of[rank]] == by_rank[rank]
            assert [keys[task] for task in tables.launches[rank]] == [by_rank[rank][index] for index in part.launches]
            for worker, queue in enumerate(part.queues):
                tasks = tables.queues[rank * num_workers + worker]
                assert [keys[task] for task in tasks] == by_rank[rank][queue.begin : queue.begin + queue.count]
                merged = merge_copies & tables.tasks.spread[tasks]
                assert (tables.tasks.worker[tasks] == np.where(merged, -1, worker)).all()
            for index, desc in enumerate(part.tasks):
                task = tables.task_of[rank][index]
                for name in ("type", "launch", "order", "max_instances", "first_worker", "deep_lookahead"):
                    assert getattr(tables.tasks, name)[task] == getattr(desc, name), name
                assert tables.tasks.rank[task] == rank
                assert tables.task_names()[task] == part.task_names[index]


def test_references_to_nothing_are_left_out() -> None:
    program = compile_graph(graphs.all_reduce(2, 2))
    whole = read_tables(program)
    part = program.ranks[1]
    task = next(desc for desc in part.tasks if desc.num_waits)
    num_left = len(whole.waits.task) - task.num_waits
    task.wait_begin = len(part.waits)
    part.queues[0].count = 1000
    part.triggers[0].rank = 2
    part.triggers[1].event = part.header.num_events
    tables = read_tables(program)
    assert len(tables.waits.task) == num_left and len(tables.queues[2]) == 0
    assert (tables.triggers.event < 0).sum() == 2
    for desc in part.tasks:
        desc.num_waits = 2**16 - 1
    assert not np.isin(read_tables(program).waits.task, whole.task_of[1]).any()
