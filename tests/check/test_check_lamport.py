"""What a task polls before its waits are met is zero or right, or the program is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections import Counter

import pytest
from support.lamport import COLS, Slots, accepted, all_reduce, refused, taking
from support.mutate import Mutator
from support.oracle import Oracle
from support.programs import complaint, find, model_graph, refusal

from distmk.abi import MAX_ROWS, NO_EVENT, Batch, LaunchKind, Space
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph, decode_args
from distmk.tasks import Affine, Put, SchedulerStep, Sum
from distmk.tasks.scheduling import batcher_bytes, candidates_bytes

NUM_RANDOM = 250


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_accepts_lamport_buffers(num_ranks: int) -> None:
    for num_workers in (1, 2, 3):
        accepted(compile_graph(all_reduce(num_ranks, num_workers)))
    program = compile_graph(model_graph(num_ranks, 2))
    names = program.ranks[0].task_names
    sums = [find(program, name) for name in names if name.endswith(".reduce")]
    assert all(decode_args(desc).polls_blocks for desc in sums) and bool(sums) == (num_ranks > 1)
    accepted(program)


def test_polled_memory_that_no_launch_zeroes_is_written_before() -> None:
    slots = Slots(lamport=False)
    slots.put("put", 0)
    slots.take("sum", 1, slots.b)
    text = refused(slots.compile())
    assert "sum (rank 0, worker 1) in the next iteration may poll slots[bytes 0:64] on rank 0 before put" in text
    assert "put (rank 0, worker 0) in the next iteration has written it, and no launch starts with zeros there" in text
    slots = Slots(lamport=False)
    slots.put("put", 1)
    slots.take("sum", 1, slots.b)
    accepted(slots.compile())


def test_a_lamport_buffer_lies_in_the_zeroed_part_of_the_heap() -> None:
    program = compile_graph(all_reduce(2, 1))
    slots = next(piece for piece in program.placement.pieces if piece.name == "slots")
    for short in (0, 4):
        reset = slots.offset + slots.num_bytes - short
        for part in program.ranks:
            part.header.zeroed_heap_bytes = reset
        program.placement = dataclasses.replace(program.placement, zeroed_heap_bytes=reset)
        if short:
            assert "and no launch starts with zeros there" in refused(program)
        else:
            accepted(program)


def test_nothing_is_published_twice() -> None:
    slots = Slots()
    slots.put("one", 0)
    slots.put("other", 0)
    slots.take("sum", 0, slots.b)
    text = refused(slots.compile())
    assert (
        "arrival: other (rank 0, worker 0) in the next iteration publishes slots[bytes 0:64] on rank 0, which" in text
    )
    assert "which no task has reset since one (rank 0, worker 0) in the next iteration published it" in text


def test_what_is_published_is_reset_before_the_next_iteration() -> None:
    slots = Slots()
    slots.put("put", 0)
    slots.take("sum", 0, slots.b, end=COLS // 2)
    text = refused(slots.compile())
    assert "put (rank 0, worker 0) in the next iteration publishes slots[bytes 0:64]" in text
    assert "no task has reset since put (rank 0, worker 0) in an iteration published it" in text


def test_a_reset_covers_all_rows() -> None:
    for rows in (1, 2):
        graph = Graph(1, 1)
        slots, b = graph.buffer("slots", COLS, rows=rows, lamport=True), graph.buffer("b", COLS)
        graph.add(taking(0, "sum", 0, slots.at(0), dst=b.at(0)))
        program = compile_graph(graph)
        if rows == 1:
            accepted(program)
        else:
            assert "sum (rank 0, worker 0) in the next iteration publishes slots[bytes 0:64]" in refused(program)


def test_no_task_both_publishes_and_resets() -> None:
    slots = Slots(1)
    slots.take("sum", 0, slots.b)
    program = slots.compile()
    accepted(program)
    args = decode_args(find(program, "sum"))
    args.dst = args.blocks
    assert Oracle(program).faults == {"overlap"}
    assert "overlap: sum (rank 0, worker 0) writes bytes 0 to 64 of a row of slots that it also" in refusal(program)


def test_resets_happen_before_polls() -> None:
    """The second sum could read what the first one was sent, unless its worker waits for the first."""
    for waited in (False, True):
        slots = Slots()
        slots.put("put0", 0)
        slots.take("sum0", 0, slots.b)
        if waited:
            slots.copy("wait", 1, slots.b, slots.a)
        slots.put("put1", 0)
        slots.take("sum1", 1, slots.c)
        if not waited:
            slots.copy("wait", 1, slots.b, slots.a)
        program = slots.compile()
        if waited:
            accepted(program)
            continue
        text = refused(program)
        assert "sum1 (rank 0, worker 1) in the next iteration may poll slots[bytes 0:64] on rank 0 before" in text
        assert "before sum0 (rank 0, worker 0) in the next iteration has reset it" in text


@pytest.mark.parametrize("waited", [COLS, COLS // 2])
def test_resets_by_several_tasks_happen_before_polls(waited: int) -> None:
    slots, half = Slots(3), COLS // 2
    for worker in (0, 1):
        block, dst = (buffer.at(0, worker * half, (worker + 1) * half) for buffer in (slots.slots, slots.b))
        slots.graph.add(Put(0, f"put{worker}", worker, src=slots.a.at(0, 0, half), dst=block))
        slots.graph.add(taking(0, f"sum{worker}", worker, block, dst=dst))
    slots.graph.add(Affine(0, "wait", 2, src=slots.b.at(0, 0, waited), dst=slots.a.at(0, 0, waited)))
    slots.put("put", 0)
    slots.take("all", 2, slots.c)
    slots.copy("end", 1, slots.c, slots.a)
    program = slots.compile()
    if waited == COLS:
        accepted(program)
        return
    text = refused(program)
    assert "all (rank 0, worker 2) in the next iteration may poll slots[bytes 0:64] on rank 0 before sum1" in text


@pytest.mark.parametrize("waited", [True, False])
def test_the_iteration_barrier_orders_polls_after_resets(waited: bool) -> None:
    """The first task of a worker polls what another worker reset last: the scheduler step may have waited for that reset."""
    graph = Graph(1, 2)
    batch = graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8")
    state = graph.buffer("state", batcher_bytes(1), dtype="u8", space=Space.LOCAL)
    table = graph.buffer("table", MAX_ROWS, dtype="i32")
    a, b, c, candidates = (graph.buffer(name, candidates_bytes() // 4) for name in ("a", "b", "c", "candidates"))
    slots = graph.buffer("slots", candidates_bytes() // 4, lamport=True)
    graph.batch = batch
    graph.add(
        SchedulerStep(
            0,
            "scheduler_step",
            launch=LaunchKind.SCHEDULER,
            candidates=candidates.at(0),
            batches=(batch.at(0),),
            page_table=table.at(0),
            state=state.at(0),
            max_positions=16,
        )
    )
    graph.add(Put(0, "put0", 0, src=a.at(0), dst=slots.at(0)))
    graph.add(taking(0, "first", 1, slots.at(0), dst=b.at(0)))
    graph.add(Put(0, "put1", 0, src=a.at(0), dst=slots.at(0)))
    graph.add(taking(0, "last", 0, slots.at(0), dst=candidates.at(0) if waited else c.at(0)))
    program = compile_graph(graph)
    assert program.ranks[0].header.iteration_event != NO_EVENT
    if waited:
        accepted(program)
        return
    text = refused(program)
    assert "first (rank 0, worker 1) in the next iteration may poll slots" in text
    assert "before last (rank 0, worker 0) in an iteration has reset it" in text


def test_only_tasks_in_queues_poll() -> None:
    slots = Slots()
    slots.put("put", 0)
    task = taking(0, "sum", None, slots.slots.at(0), dst=slots.b.at(0))
    slots.graph.add(dataclasses.replace(task, launch=LaunchKind.SINGLE))
    text = refused(slots.compile())
    assert "sum (rank 0, dispatched) polls slots[bytes 0:64] on rank 0 before its waits are met" in text
    assert "but is in no worker's queue" in text


def random_lamport_graph(random_: random.Random) -> Graph:
    """Puts, sums that poll and sums that wait, on random parts of Lamport and other buffers."""
    num_ranks, num_workers = random_.randint(1, 3), random_.randint(1, 3)
    graph = Graph(num_ranks, num_workers)
    x, y = graph.buffer("x", COLS), graph.buffer("y", COLS)
    slots = [graph.buffer(f"slots{i}", COLS, lamport=random_.random() < 0.8) for i in range(random_.randint(1, 2))]
    for index in range(random_.randint(2, 8)):
        rank, worker, cols = random_.randrange(num_ranks), random_.randrange(num_workers), random_.choice([8, 16])
        begin = random_.randrange(0, COLS - cols + 1, 8)
        slot, (src, dst) = random_.choice(slots), random_.sample([x, y], 2)
        there = slot.at(rank, begin, begin + cols)
        by = random_.randrange(num_ranks)
        graph.add(Put(by, f"put{index}", random_.randrange(num_workers), src=src.at(by, 0, cols), dst=there))
        if random_.random() < 0.9:
            polls = random_.random() < 0.8
            graph.add(Sum(rank, f"sum{index}", worker, blocks=(there,), dst=dst.at(rank, 0, cols), polls_blocks=polls))
        if random_.random() < 0.3:
            graph.add(Affine(rank, f"copy{index}", random_.randrange(num_workers), src=dst.at(rank), dst=src.at(rank)))
    return graph


def test_random_graphs_of_lamport_buffers() -> None:
    """The oracle agrees on every random program, half of them damaged."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source, seen = random.Random(seed), Counter[str]()
    while seen["drawn"] < NUM_RANDOM:
        draw = source.randrange(2**32)
        random_ = random.Random(draw)
        make = random_.choice([random_lamport_graph, lambda r: all_reduce(r.randint(1, 3), r.randint(1, 3))])
        try:
            program = compile_graph(make(random_))
        except UsageError as error:
            assert "read it in between" in str(error), f"seed {seed} draw {draw}"
            continue
        did = Mutator(program, random_).mutate() if random_.random() < 0.5 else ""
        faults = Oracle(program).faults
        text = complaint(program)
        assert bool(text) == bool(faults), f"seed {seed} draw {draw} {did}: oracle {faults}, check {text!r}"
        assert faults != {"arrival"} or "arrival: " in text, f"seed {seed} draw {draw} {did}: {text}"
        seen.update(["drawn", "only arrival" if faults == {"arrival"} else "other" if faults else "right"])
    print(dict(seen))
    assert min(seen["only arrival"], seen["other"], seen["right"]) > NUM_RANDOM // 20
