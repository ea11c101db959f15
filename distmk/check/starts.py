"""When a task may begin: its body is entered as soon as the one before it in its worker's queue is done, and a task that
looks early acts on what it sees. Its own waits are met only by its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distmk.check.order import Order
from distmk.clocks import Clock


class Starts:
    """What is behind the tasks of the second iteration when their workers turn to them."""

    def __init__(self, order: Order) -> None:
        self.order, self.view = order, order.view
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

    def _behind(self, queue: npt.NDArray[np.int64], at: int, rank: int) -> Clock:
        """The task before in the queue, all that shares in between have waited for, and the gate of the iteration."""
        table, num_tasks = self.order.clocks.table, self.view.num_tasks
        gates = self.order.signals.gates
        clock: Clock = np.zeros_like(table[0])
        for before in _backwards(queue, at, num_tasks):
            if not self.view.spread[before % num_tasks]:
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


def _backwards(queue: npt.NDArray[np.int64], at: int, num_tasks: int) -> Iterator[int]:
    """The nodes before place `at` of a queue, the nearest first: of the second iteration, then of the first."""
    for task in queue[:at][::-1]:
        yield int(task) + num_tasks
    yield from map(int, queue[::-1])
