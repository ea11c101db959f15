"""The access log against the last writer of every element and its readers since."""

from __future__ import annotations

import numpy as np

from distmk.graph.graph import Graph
from distmk.sync.access_log import AccessLog
from distmk.sync.happens_before import READ, HappensBefore
from distmk.sync.interval_map import Group
from distmk.tasks import Nop

SIZE, NUM_TASKS = 4, 100
INTERVALS = [
    (0, 4),
    (1, 2),
    (0, 1),
    (2, 4),
    (1, 3),
]  # few, so that intervals are read as they were written, and then split


def parallel(num_tasks: int) -> HappensBefore:
    """Tasks of one rank that write there, each on a worker of its own."""
    graph = Graph(1, num_tasks)
    for worker in range(num_tasks):
        graph.add(Nop(0, "nop", worker))
    return HappensBefore(graph, [frozenset({0})] * num_tasks)


def reader(order: HappensBefore, node: int) -> Group:
    return Group([node], order.on_node(node, READ), shared=True)


def test_parts_of_an_interval_have_their_own_readers() -> None:
    """[0, 4) is written and read as a whole, split by another write, and read on in one part."""
    order = parallel(6)
    log = AccessLog(0, order)
    assert log.write(0, 4, 0) == []
    for node in (1, 2):
        found = log.read(0, 4, reader(order, node))
        assert found is not None and found.nodes == (0,)
    log.write(1, 2, 3)
    log.read(0, 1, reader(order, 4))
    assert [dependency.nodes for dependency in log.write(2, 4, 5)] == [(1, 2)]


def test_rows_of_different_owners_are_not_ordered() -> None:
    """Each rank's write comes after the readers of the last ones, and not after the others; the next reader after all."""
    graph = Graph(3, 1)
    for rank in (0, 1, 2, 0, 0, 1, 1):
        graph.add(Nop(rank, "nop", 0))
    order = HappensBefore(graph, [frozenset({0})] * 7)
    log = AccessLog(0, order)

    def write(node: int) -> set[int]:
        return {each for dependency in log.write_owned(0, 4, node) for each in dependency.nodes}

    assert not write(0) and not write(1) and not write(2)
    found = log.read(0, 4, reader(order, 3))
    assert found is not None and found.nodes == (0, 1, 2)
    assert write(4) == write(5) == {3}
    assert write(6) == {4, 5}, "a rank's second write overwrites those of the others, too"
    assert write(2 + 7) == {6}, "another iteration: the batch and so the owners are others"
    log.write(0, 2, 3 + 7)
    assert write(1 + 7) == {2 + 7, 3 + 7}, "no longer written as a whole"


def test_dependencies_cover_every_conflict(rng: np.random.Generator) -> None:
    """Tasks that read or write intervals at random, each on a worker of its own: no node that conflicts is left out, unless a
    reader that is listed comes after it, and nothing else is listed.
    """
    for _ in range(30):
        order = parallel(NUM_TASKS)
        log = AccessLog(0, order)
        writer: list[int | None] = [None] * SIZE
        readers = [set[int]() for _ in range(SIZE)]
        for node in range(NUM_TASKS):
            begin, end = INTERVALS[rng.integers(len(INTERVALS))]
            writers = {w for w in writer[begin:end] if w is not None}
            if rng.random() < 0.7:
                found = log.read(begin, end, reader(order, node))
                assert {*(found.nodes if found else ())} == writers
                for element in range(begin, end):
                    readers[element].add(node)
            else:
                listed = {n for dependency in log.write(begin, end, node) for n in dependency.nodes}
                read_by = {node for element in range(begin, end) for node in readers[element]}
                assert read_by <= listed <= read_by | writers
                unread = {w for e in range(begin, end) if (w := writer[e]) is not None and not readers[e]}
                assert unread <= listed, "a writer that nobody has read"
                writer[begin:end] = [node] * (end - begin)
                readers[begin:end] = [set() for _ in range(begin, end)]
