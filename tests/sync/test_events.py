"""Waits and triggers derived from the regions that tasks read and write: enough of them, and none too many."""

from __future__ import annotations

from support import graphs
from support.oracle import Oracle
from support.programs import find, refusal

from distmk.abi import Wait
from distmk.check import check
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph
from distmk.sync.events import derive
from distmk.tasks import Affine, Put, Sum


def relay(through: str) -> Graph:
    """Rank 0 pushes to all ranks; rank 1 sends its copy on to rank 2, which adds up both."""
    graph = Graph(3, 1)
    x, y, z = graph.buffer("x", 4), graph.buffer("y", 4), graph.buffer("z", 8)
    if through == "push":
        graphs.push_linear(graph, 0, graph.buffer("w", 4, dtype="bf16").at(0), z.at(0, 0, 4), "spread")
    else:
        graph.add(Put(0, "spread", src=x.at(0), dst=z.at(1, 0, 4)))
    graph.add(Put(1, "relay", src=z.at(1, 0, 4), dst=z.at(2, 4, 8)))
    graph.add(Sum(2, "both", blocks=(z.at(2, 0, 4), z.at(2, 4, 8)), dst=y.at(2)))
    for rank in range(2):
        graph.add(Affine(rank, "use", src=z.at(rank, 0, 4), dst=y.at(rank)))
    return graph


def test_a_push_says_nothing_of_other_ranks() -> None:
    """An event of one rank tells nothing of a push's data on another rank."""
    graph = relay("push")
    wiring = derive(graph)
    both = next(i for i, task in enumerate(graph.tasks) if task.op == "both")
    assert sorted(p for event, _ in wiring.waits[both] for p in event.producers) == [0, 1]
    program = compile_graph(graph)
    check(program)
    task = find(program, "both", 2)
    part = program.ranks[2]
    direct = [i for i in range(2) if "spread" in part.event_names[part.waits[task.wait_begin + i].event]]
    if direct == [0]:
        part.waits[task.wait_begin] = Wait.from_buffer_copy(part.waits[task.wait_begin + 1])
    task.num_waits = 1
    assert "race: both (rank 2, worker 0)" in refusal(program)
    assert "spread (rank 0, worker 0)" in refusal(program)
    assert Oracle(program).faults == {"race"}


def test_a_chain_on_one_worker_needs_no_waits() -> None:
    graph = Graph(1, 1)
    buffers = [graph.buffer(f"b{i}", 4) for i in range(5)]
    for i in range(4):
        graph.add(Affine(0, f"t{i}", src=buffers[i].at(0), dst=buffers[i + 1].at(0)))
    wiring = derive(graph)
    assert not any(wiring.waits) and not any(wiring.triggers) and not wiring.events[0]


def test_transitive_waits_are_pruned() -> None:
    """d reads the output of a, but c, before it on its worker, waits for b, and b for a."""
    graph = Graph(1, 3)
    a, b, c, x = (graph.buffer(name, 8) for name in "abcx")
    graph.add(Affine(0, "a", 0, src=x.at(0), dst=a.at(0)))
    graph.add(Affine(0, "b", 1, src=a.at(0), dst=b.at(0)))
    graph.add(Affine(0, "c", 2, src=b.at(0), dst=c.at(0)))
    graph.add(Affine(0, "d", 2, src=a.at(0), dst=c.at(0)))
    wiring = derive(graph)
    assert [[(event.producers, lag) for event, lag in waits] for waits in wiring.waits] == [
        [((1, 3), 1)],  # the readers of its output
        [((0,), 0)],  # not for c, which read b: a comes after d, and d after c
        [((1,), 0)],
        [],
    ]


def test_every_wait_is_needed() -> None:
    """A pipeline or a ring without any one of its waits is refused."""
    for graph in (graphs.pipeline(3, 1), graphs.ring(3, 1)):
        total = len([wait for waits in derive(graph).waits for wait in waits])
        for nth in range(total):
            program = compile_graph(graph)
            tasks = [(part, task) for part in program.ranks for task in part.tasks for _ in range(task.num_waits)]
            part, task = tasks[nth]
            offset = nth - tasks.index((part, task))
            part.waits[task.wait_begin + offset] = Wait.from_buffer_copy(
                part.waits[task.wait_begin + task.num_waits - 1]
            )
            task.num_waits -= 1
            assert "race: " in refusal(program)
