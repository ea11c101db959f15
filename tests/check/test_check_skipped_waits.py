"""A task that may end before its waits are met has polled all that its producers publish, or the program is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.lamport import COLS, Slots, accepted, refused, taking
from support.programs import find

from distmk.abi import Epilogue, Space, operand
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph, decode_args
from distmk.tasks import Linear, Put


def test_its_producers_publish_only_what_it_polls() -> None:
    slots = Slots()
    slots.copy("read", 1, slots.b, slots.c)
    slots.put("put", 1)
    slots.take("sum", 0, slots.b)
    accepted(slots.compile())
    slots = Slots()
    slots.put("put", 0)
    slots.copy("read", 1, slots.b, slots.c)
    slots.take("sum", 0, slots.b)
    text = refused(slots.compile())
    assert "arrival: sum (rank 0, worker 0) may end before event" in text
    assert "which it waits for: read (rank 0, worker 1), which fires it, does more than publish what it polls" in text


def test_every_producer_publishes_something_that_it_polls() -> None:
    slots, half = Slots(3), COLS // 2
    elsewhere = slots.graph.buffer("elsewhere", COLS)
    for worker in range(2):
        dst = slots.slots.at(0, worker * half, (worker + 1) * half)
        slots.graph.add(Put(0, f"put{worker}", worker, src=slots.a.at(0, 0, half), dst=dst))
    slots.take("sum", 2, slots.b)
    program = slots.compile()
    accepted(program)
    for worker in range(2):
        args = decode_args(find(program, f"put{worker}"))
        kept = args.dst
        args.dst = operand(Space.HEAP, program.placement.buffers[elsewhere].offset)
        text = f"put{worker} (rank 0, worker {worker}), which fires it, does more than publish what it polls"
        assert text in refused(program)
        args.dst = kept


def test_it_polls_all_that_its_producers_publish() -> None:
    slots = Slots()
    slots.put("put", 0)
    slots.take("sum", 1, slots.b, COLS // 2)
    slots.take("rest", 0, slots.c)
    assert "put (rank 0, worker 0), which fires it, does more than publish what it polls" in refused(
        slots.compile(), "race"
    )


@pytest.mark.parametrize("worker", [0, 1])
def test_it_knows_nothing_of_pushes_to_other_ranks(worker: int) -> None:
    """It has polled the push of its own rank; only the pusher's worker knows that the push to the other rank has landed."""
    graph = Graph(2, 2)
    x, y = graph.buffer("x", 8, dtype="bf16"), graph.buffer("y", COLS)
    slots = graph.buffer("slots", 2 * COLS, lamport=True)
    for rank in range(2):
        slab, out = (
            graph.constant("w", rank, np.zeros((COLS, 8), np.uint16)),
            slots.at(rank, rank * COLS, (rank + 1) * COLS),
        )
        graph.add(Linear(rank, "push", 0, x=x.at(rank), slab=slab, out=out, epilogue=Epilogue.PUSH, num_ranks=2))
    for rank in range(2):
        blocks = [slots.at(rank, source * COLS, (source + 1) * COLS) for source in range(2)]
        graph.add(taking(rank, "sum", worker, *blocks, dst=y.at(rank)))
    program = compile_graph(graph)
    if worker == 0:
        accepted(program)
    else:
        text = refused(program)
        assert "push (rank 0, worker 0), which fires it, does more than publish what it polls" in text


def test_its_producers_do_not_skip_their_waits() -> None:
    """The published result of a sum proves nothing about the tasks that the sum waits for."""
    slots = Slots(3)
    more = slots.graph.buffer("more", COLS, lamport=True)
    slots.put("put", 0)
    slots.take("sum", 1, more)
    slots.graph.add(taking(0, "next", 2, more.at(0), dst=slots.c.at(0)))
    text = refused(slots.compile(), "race")
    assert "sum (rank 0, worker 1), which fires it, does more than publish what it polls" in text


def test_it_waits_for_its_own_iteration_only() -> None:
    slots = Slots()
    slots.put("put", 0)
    slots.take("sum", 0, slots.b)
    slots.copy("read", 1, slots.b, slots.c)
    text = refused(slots.compile(), "race")
    assert "arrival: sum (rank 0, worker 0) may end before event" in text and "it waits for with lag 1" in text
