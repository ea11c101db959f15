"""When a task may begin. Its body is entered as soon as that of the one before it in its worker's queue is done and the
waits of the last but one are met, or, if it may begin `deep_lookahead`, of the one before that; a task that looks early acts on
what it sees, and its worker may go on before its own waits are met, as it may from one that has nothing to do. It fires
nothing before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distmk.check.memory import Span
from distmk.check.order import Order
from distmk.sync.vector_clock import Clock


class Starts:
    """What is behind the tasks of the second iteration when their workers turn to them."""

    def __init__(self, order: Order, touched: list[tuple[Span, ...]]) -> None:
        self.order, self.view = order, order.view
        # What tasks look at that act on it before their waits are met: place, begin and end.
        self.looks = {task: looks for task, spans in enumerate(touched) if (looks := _early_reads(spans))}
        self._passed = {*self.looks, *order.memory.passing}  # from which a worker may go on before their waits are met
        self._skips = np.isin(np.arange(self.view.num_tasks), order.memory.skipping)
        self.queued = (self.view.worker >= 0) | self.view.spread  # which tasks are in a worker's queue
        self._at = np.zeros(self.view.num_tasks, np.int64)  # place in its worker's queue
        for queue in self.view.queues:
            self._at[queue] = np.arange(len(queue))

    def clock(self, task: int) -> Clock:
        """Of a task in a worker's queue. A spread one begins as soon as any worker comes to its share."""
        rank, num_workers = self.order.rank_of[task], self.view.num_workers
        queues = self.view.queues[rank * num_workers : (rank + 1) * num_workers]
        if not self.view.spread[task]:
            return self._behind(queues[self.view.worker[task]], int(self._at[task]), rank)
        clock: Clock | None = None
        for queue in queues:
            behind = self._behind(queue, int(np.flatnonzero(queue == task)[0]), rank)
            clock = behind if clock is None else np.minimum(clock, behind)
        assert clock is not None, "a rank has workers"
        return clock

    def acting(self, task: int) -> Clock:
        """When it has seen what it looks at: who may end without his waits has seen what others wrote after theirs, if
        those do not look early, too.
        """
        seen: Clock = self.clock(task).copy()
        for event, lag in self.order.signals.waits[task] if self._skips[task] else ():
            if not lag and not any(producer in self.looks for producer in self.order.signals.producers[event]):
                np.maximum(seen, self.order.hears(event, 1), out=seen)
        return seen

    def _behind(self, queue: npt.NDArray[np.int64], at: int, rank: int) -> Clock:
        """The tasks before in the queue, all that shares in between have waited for, and the gate of the iteration. Of the
        last one, or two, if they are of the same iteration and may be done without their waits, only that they are done.
        """
        table, num_tasks = self.order.clocks.table, self.view.num_tasks
        gates = self.order.signals.gates
        clock: Clock = np.zeros_like(table[0])
        num_unmet = min(at, 2 if self.view.deep_lookahead[queue[at]] else 1)
        for place, before in enumerate(_backwards(queue, at, num_tasks)):
            spread = self.view.spread[before % num_tasks]
            if place < num_unmet and (spread or before % num_tasks in self._passed):
                if not spread:
                    clock[self.order.chain[before]] = self.order.position[before]
                continue
            if not spread:
                if not clock.any() and before >= num_tasks:
                    known: Clock = table[before]
                    return known
                np.maximum(clock, table[before], out=clock)
                break
            own = self.order.chain[before]
            np.maximum(clock, table[before], out=clock)
            clock[own] = 0  # others may still be at theirs
        if gates:
            np.maximum(clock, self.order.hears(gates[rank], 1), out=clock)
        return clock


def _early_reads(spans: tuple[Span, ...]) -> frozenset[tuple[int, int, int]]:
    return frozenset(span[1:4] for span in spans if span.early)


def _backwards(queue: npt.NDArray[np.int64], at: int, num_tasks: int) -> Iterator[int]:
    """The nodes before place `at` of a queue, the nearest first: of the second iteration, then of the first."""
    for task in queue[:at][::-1]:
        yield int(task) + num_tasks
    yield from map(int, queue[::-1])
