"""While an engine is busy, Python's collector passes by the objects that were there before; afterwards all is as it was."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest
from support.simulated_engine import Callers

from distmk import gc_pause
from distmk.engine import engine_thread
from distmk.gc_pause import FrozenHeap


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    count = gc.get_freeze_count()
    gc.unfreeze()
    assert count == 0


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def busy_heap() -> FrozenHeap:
    """The heap of an engine that has been busy for a while."""
    heap = FrozenHeap()
    for settled in (0.0, 0.9, 1.1):
        assert gc.get_freeze_count() == 0
        heap.busy(settled * gc_pause._SETTLED_S)
    return heap


def test_a_full_pass_sees_only_what_is_new() -> None:
    old = [[number] for number in range(100_000)]
    num_objects = len(gc.get_objects())
    heap = busy_heap()
    assert gc.get_freeze_count() > len(old) and len(gc.get_objects()) < 0.1 * num_objects
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None
    for waited_s in (2.0, 2.0 + 0.9 * gc_pause._IDLE_S):
        heap.idle(waited_s)
        assert len(gc.get_objects()) < 0.1 * num_objects
    heap.idle(2.1 + gc_pause._IDLE_S)
    assert len(gc.get_objects()) > len(old)


def test_an_engine_that_is_busy_for_moments_freezes_nothing() -> None:
    heap = FrozenHeap()
    for second in range(5):
        heap.busy(second)
        heap.busy(second + 0.9 * gc_pause._SETTLED_S)
        heap.idle(second + 0.95 * gc_pause._SETTLED_S)
        assert gc.get_freeze_count() == 0


def test_moments_without_requests_change_nothing() -> None:
    heap = busy_heap()
    for second in range(3):
        heap.idle(2.0 * second)
        heap.busy(2.0 * second + 0.9 * gc_pause._IDLE_S)
    assert gc.get_freeze_count() > 0
    heap.release()
    assert gc.get_freeze_count() == 0


def test_frozen_garbage_is_collected_later() -> None:
    """The next full pass collects it; without one, growth of memory by a quarter does."""
    heap = FrozenHeap()
    for grows in (False, True):
        kept = [[number] for number in range(400_000 if grows else 0)]
        with gc_pause.no_collection():  # so that it lasts until it is frozen
            gc.collect(0)
            cycle = Node()
            node = weakref.ref(cycle)
            gc.collect(1), gc.collect(1)  # old enough to be passed by
            del cycle
        for now_s in (0.0, 1.1):
            heap.busy(now_s)
        assert node() is not None and gc.get_freeze_count() > len(kept)
        with gc_pause.no_collection():
            heap.release()
            assert (node() is None) == grows
    gc.collect()
    assert node() is None


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    heap = FrozenHeap()
    for now_s in (0.0, 2.0, 4.0):
        heap.busy(now_s)
    heap.release()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


@pytest.mark.whole
@pytest.mark.parametrize("faults", [False, True])
def test_the_engine_freezes_while_it_has_requests(faults: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "_SETTLED_S", -1.0)
    monkeypatch.setattr(gc_pause, "_IDLE_S", 0.0)
    monkeypatch.setattr(engine_thread, "_IDLE_POLL_S", 0.0005)
    seen: list[tuple[bool, bool]] = []

    class Watched(Callers):
        def act(self) -> None:
            if self.engine.running is None:
                seen.append((False, gc.get_freeze_count() > 0))
            elif self.engine.running.num_iterations > 2:
                seen.append((True, gc.get_freeze_count() > 0))
            super().act()

    for seed in range(
        int(time.time()), int(time.time()) + 8
    ):  # ten actions may be too few for a launch of some iterations
        callers = Watched(seed, 10, faults=faults)
        while not callers.is_over:
            time.sleep(0.001)
        callers.thread.stop()
        if (True, True) in seen:
            break
    assert (True, True) in seen
    assert faults or (False, True) not in seen  # the calls of a launch that fails are told before
