"""The interval map against a list of nodes for every element."""

from __future__ import annotations

import numpy as np

from distmk.sync.interval_map import Group, IntervalMap

SIZE = 12


def test_entries_cover_what_was_added(rng: np.random.Generator) -> None:
    """Intervals added, cut and replaced at random: each element keeps the nodes since it was last cut or replaced."""
    for _ in range(50):
        log, elements = IntervalMap(), [set[int]() for _ in range(SIZE)]
        for node in range(40):
            begin, end = sorted(rng.choice(SIZE + 1, 2, replace=False).tolist())
            what, version = rng.choice(["add", "cut", "replace"], p=[0.5, 0.25, 0.25]), log.version
            found = log.cut(begin, end) if what == "cut" else log.overlapping(begin, end)
            assert all(entry.begin < end and begin < entry.end for entry in found)
            for element in range(begin, end):
                nodes = [n for entry in found if entry.begin <= element < entry.end for n in entry.group.nodes]
                assert sorted(nodes) == sorted(elements[element]), f"element {element} of [{begin}, {end})"
            if what == "add":
                log.add(begin, end, Group([node], shared=rng.random() < 0.5))
            if what == "replace":
                log.replace(begin, end, Group([node], shared=rng.random() < 0.5))
                assert [entry.group.nodes for entry in log.overlapping(begin, end)] == [[node]]
            for element in range(begin, end):
                elements[element] = {"add": elements[element] | {node}, "cut": set(), "replace": {node}}[str(what)]
            assert log.version > version


def test_a_note_goes_when_the_nodes_change() -> None:
    log = IntervalMap()
    log.add(0, 4, Group([1], note="of 1"))
    log.add(0, 4, Group([2]))
    (entry,) = log.overlapping(0, 4)
    assert entry.group.nodes == [1, 2] and entry.group.note is None


def test_a_shared_group_does_not_change() -> None:
    """Neither one that is added to two intervals nor one whose entry is split."""
    log, group = IntervalMap(), Group([1], shared=True)
    log.add(0, 4, group)
    log.add(4, 8, group)
    log.add(0, 4, Group([2]))
    assert group.nodes == [1]
    log = IntervalMap()
    log.add(0, 6, Group([1]))
    log.cut(2, 4)
    log.add(0, 2, Group([2]))
    assert [entry.group.nodes for entry in log.overlapping(0, 6)] == [[1, 2], [1]]
