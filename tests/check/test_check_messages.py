"""The messages of `check` name tasks, events, buffers and ranks."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import numpy as np
import pytest
from support import graphs
from support.oracle import Oracle
from support.programs import find, model_graph, refusal

from distmk.abi import NO_EVENT, JitRing, LaunchKind, Trigger, Wait
from distmk.check import check
from distmk.check.bounds import Span, overlap_of
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph, decode_args
from distmk.tasks import Affine


def test_race_names_tasks_buffer_and_ranks() -> None:
    program = compile_graph(graphs.pipeline(2, 1))
    for part in program.ranks:
        for task in part.tasks:
            kept = [part.waits[task.wait_begin + i] for i in range(task.num_waits)]
            kept = [Wait.from_buffer_copy(wait) for wait in kept if not wait.lag]
            for i, wait in enumerate(kept):
                part.waits[task.wait_begin + i] = wait
            task.num_waits = len(kept)
    text = refusal(program)
    assert "race: pass0 (rank 0, worker 0) in the next iteration writes in1[bytes 0:64] on rank 1" in text
    assert "stage1 (rank 1, worker 0) in an iteration, which reads it" in text


def test_threshold_names_task_and_event() -> None:
    program = compile_graph(graphs.ring(2, 1))
    part = program.ranks[1]
    task = find(program, "scale", 1)
    part.waits[task.wait_begin].count = 2
    text = refusal(program)
    assert "threshold: scale (rank 1, worker 0) waits for 2 of event" in text
    assert "'send done' of rank 1, which is triggered 1 times" in text
    find(program, "send", 0).num_triggers = 0
    part.waits[task.wait_begin].count = 1
    assert "which no task triggers" in refusal(program)


def test_cycle_names_tasks() -> None:
    program = compile_graph(graphs.ring(2, 1))
    find(program, "scale", 0)
    for part in program.ranks:
        for wait in part.waits:
            wait.lag = 0
    text = refusal(program)
    assert "cycle: " in text and " -> " in text
    for name in ("scale (rank 0, worker 0)", "send (rank 0, worker 0)", "scale (rank 1, worker 0)"):
        assert name in text


def test_launch_order_can_deadlock() -> None:
    """A scheduler that must dispatch the second task first is stuck."""
    graph = Graph(1, 1)
    a = graph.buffer("a", 4)
    b = graph.buffer("b", 4)
    c = graph.buffer("c", 4)
    graph.add(Affine(0, "early", launch=LaunchKind.SINGLE, src=a.at(0), dst=b.at(0)))
    graph.add(Affine(0, "late", launch=LaunchKind.SINGLE, src=b.at(0), dst=c.at(0)))
    program = compile_graph(graph)
    check(program)
    launches = program.ranks[0].launches
    launches[0], launches[1] = launches[1], launches[0]
    text = refusal(program)
    assert "cycle: " in text and "dispatch late (rank 0, dispatched)" in text
    assert Oracle(program).faults == {"deadlock"}


def test_counting_names_both() -> None:
    """Two producers of one counter, one of which has no waits."""
    graph = Graph(1, 3)
    sources = [graph.buffer(f"s{i}", 4) for i in range(2)]
    both, out = graph.buffer("both", 8), graph.buffer("out", 8)
    for i, source in enumerate(sources):
        graph.add(Affine(0, f"part{i}", i, src=source.at(0), dst=both.at(0, 4 * i, 4 * i + 4)))
    graph.add(Affine(0, "whole", 2, src=both.at(0), dst=out.at(0)))
    program = compile_graph(graph)
    find(program, "part0").num_waits = 0
    text = refusal(program)
    assert "counting: part0 (rank 0, worker 0) may fire event" in text
    assert "before part1 (rank 0, worker 1) has for this one" in text
    assert "race: " in text


def test_bounds_names_task_and_buffer() -> None:
    program = compile_graph(graphs.ring(2, 1))
    args = decode_args(find(program, "send", 1))
    args.dst += 8
    assert "bounds: send (rank 1, worker 0): write of 1 x 64 bytes" in refusal(program)
    assert "is not inside buffer got (64 bytes" in refusal(program)
    args.dst -= 6
    assert "is not aligned" in refusal(program)
    args.dst -= 2
    args.dst_rank = 2**31
    assert "rank that is not there" in refusal(program)


def test_writes_to_weights_are_refused() -> None:
    program = compile_graph(graphs.push_reduce(2, 1))
    args = decode_args(find(program, "sum0"))
    args.dst, args.batch, args.num_cols, args.dst_stride = decode_args(find(program, "push0")).weight, 0, 4, 4
    assert "which is read only" in refusal(program)


def test_overlap_names_both() -> None:
    program = compile_graph(graphs.ring(2, 1))
    placement = program.placement
    have, got = placement.pieces
    events = placement.events_heap_offset
    for moved, name in ((have.offset, "buffer have"), (0, "the control block"), (events, "the events")):
        pieces = (have, dataclasses.replace(got, offset=moved))
        program.placement = dataclasses.replace(placement, pieces=pieces)
        text = refusal(program)
        assert "overlap: " in text and name in text and "buffer got" in text and "memory of rank 0" in text


def test_a_read_beside_the_one_of_what_is_written() -> None:
    """The scheduler step reads and writes the batch, which is right, and reads a part of it as candidates, which is not."""
    program = compile_graph(model_graph(1, 2))
    step = next(desc for desc in program.ranks[0].tasks if desc.launch == LaunchKind.SCHEDULER)
    args = decode_args(step)
    args.candidates = args.batch
    assert Oracle(program).faults == {"overlap"}
    assert "overlap: scheduler_step" in (text := refusal(program)) and "a row of batch16 that it also accesses" in text


def test_overlaps_of_one_task(rng: np.random.Generator) -> None:
    """Any two accesses of which one is a write, unless the other is a read of the same bytes."""
    for _ in range(2000):
        drawn = rng.integers(0, (2, 2, 6, 4), size=(rng.integers(1, 6), 4)).tolist()
        spans = [Span(bool(write), location, begin, begin + size + 1) for write, location, begin, size in drawn]
        wrong = any(
            (a.write or b.write)
            and (a.location == b.location and a.begin < b.end and b.begin < a.end)
            and (a.write == b.write or (a.begin, a.end) != (b.begin, b.end))
            for a, b in itertools.combinations(spans, 2)
        )
        assert (overlap_of(spans) is not None) == wrong, spans


@pytest.mark.parametrize(("change", "text"), [(-256, "the rings end at"), (1 << 20, "bytes of a heap of")])
def test_what_a_launch_zeroes(change: int, text: str) -> None:
    """A launch zeroes all that the protocol needs, and no more than the heap."""
    program = compile_graph(graphs.ring(2, 1))
    reset = program.placement.zeroed_heap_bytes + change
    program.placement = dataclasses.replace(program.placement, zeroed_heap_bytes=reset)
    for part in program.ranks:
        part.header.zeroed_heap_bytes = reset
    assert Oracle(program).faults == {"layout"}
    assert f"bounds: {'a launch zeroes' if change > 0 else text}" in refusal(program) and text in refusal(program)


def test_headers_must_agree() -> None:
    program = compile_graph(graphs.ring(2, 1))
    program.ranks[1].header.rings_heap_offset += ctypes.sizeof(JitRing)
    assert "header: rank 1 has rings_heap_offset" in refusal(program)
    program = compile_graph(graphs.ring(2, 1))
    program.ranks[1].header.abi_hash ^= 1
    assert "header: rank 1 has another magic or ABI hash" in refusal(program)
    program.ranks.reverse()
    assert "rank 0 of 2 says it is rank 1 of 2" in refusal(program)


def test_queues_and_launches_hold_each_task_once() -> None:
    program = compile_graph(graphs.handed_out(1, 1))
    program.ranks[0].queues[0].count -= 1
    assert "queue: away (rank 0, dispatched) is in 0 queues, expected 1" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    launches = program.ranks[0].launches
    launches[0] = launches[1]
    assert "is in 2 launch lists, expected 1" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "first").type = 999
    assert "task: first (rank 0, worker 0) is of unknown type 999" in refusal(program)


def test_the_scheduler_step_signals_the_iteration_barrier() -> None:
    program = compile_graph(model_graph(2, 2))
    program.ranks[1].header.iteration_event = NO_EVENT
    assert "iteration barrier: rank 1 has no iteration barrier" in refusal(program)
    program = compile_graph(model_graph(2, 2))
    prepare = next(i for i, t in enumerate(program.ranks[0].tasks) if t.launch == LaunchKind.SCHEDULER)
    task = program.ranks[0].tasks[prepare]
    for i in range(task.num_triggers):
        trigger: Trigger = program.ranks[0].triggers[task.trigger_begin + i]
        trigger.amount = 2
    assert "iteration barrier: event" in refusal(program)


def test_schedulers_run_nothing_but_the_scheduler_step() -> None:
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "single").launch = LaunchKind.SCHEDULER
    assert "task: single (rank 0, dispatched) is run by a scheduler: only one task of rank 0" in refusal(program)
