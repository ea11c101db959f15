"""The vector clock at which a task may start, if its worker may start it before its waits are met.

A worker may start a task as soon as the body of the previous task in its queue is done and the waits of the task before
that are met. With `deep_lookahead` the last two tasks need only be done, and the waits of the task before those two
must be met. A task that polls its inputs may act on them before its waits are met, and the worker may then go on to its
next task. The worker may also go on after a task that has nothing to do. No task signals before its waits are met.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distmk.check.bounds import Span
from distmk.check.happens_before import HappensBefore
from distmk.program.reader import Ints
from distmk.sync.vector_clock import VectorClock

Polled = frozenset[tuple[int, int, int]]  # spans that a task polls: location, begin, end


class EarlyStart:
    """For each task of the second iteration, the vector clock of the moment when its worker may start it."""

    def __init__(self, before: HappensBefore) -> None:
        self.before, self.tables = before, before.tables
        accesses = before.accesses
        self.polls = {task: polled for task, spans in enumerate(accesses.spans) if (polled := _polled(spans))}
        # Tasks that a worker may finish before their waits are met.
        self._done_early = {*self.polls, *accesses.skippable}
        self._skips_waits = np.isin(np.arange(self.tables.num_tasks), accesses.skips_waits)
        self.queued = (
            self.tables.tasks.worker >= 0
        ) | self.tables.tasks.spread  # whether a worker's queue has the task
        self._index = np.zeros(self.tables.num_tasks, np.int64)  # in its worker's queue
        for queue in self.tables.queues:
            self._index[queue] = np.arange(len(queue))

    def clock(self, task: int) -> VectorClock:
        """When a queued task may start. For a spread task: when the first of the workers may start it."""
        rank, num_workers = self.before.rank_of[task], self.tables.num_workers
        queues = self.tables.queues[rank * num_workers : (rank + 1) * num_workers]
        if not self.tables.tasks.spread[task]:
            return self._behind(queues[self.tables.tasks.worker[task]], int(self._index[task]), rank)
        clocks = [self._behind(queue, int(np.flatnonzero(queue == task)[0]), rank) for queue in queues]
        earliest: VectorClock = np.minimum.reduce(clocks)
        return earliest

    def write_clock(self, task: int) -> VectorClock:
        """When a polling task may write, which is after it has polled its inputs.

        If the task may skip its waits, its polls also prove that the producers of its events had met their own waits.
        Producers that poll prove nothing, as they may write before their waits are met.
        """
        clock: VectorClock = self.clock(task).copy()
        for event, lag in self.before.signals.waits[task] if self._skips_waits[task] else ():
            if not lag and not any(producer in self.polls for producer in self.before.signals.producers[event]):
                self.before.acquire(clock, event, 1)
        return clock

    def _behind(self, queue: Ints, index: int, rank: int) -> VectorClock:
        """The clock of a worker that has come to position `index` of its queue.

        The worker knows the earlier tasks of its queue, what its copies of spread tasks waited for, and the iteration
        barrier. Less is known of the last task (with deep lookahead the last two), if it belongs to the same iteration
        and may be done before its waits are met: only that it is done, and nothing of a spread task.
        """
        table, num_tasks, spread = self.before.clocks.table, self.tables.num_tasks, self.tables.tasks.spread
        clock: VectorClock = np.zeros_like(table[0])
        num_unmet = min(index, 2 if self.tables.tasks.deep_lookahead[queue[index]] else 1)
        for distance, node in enumerate(_backwards(queue, index, num_tasks)):
            is_spread = spread[node % num_tasks]
            if distance < num_unmet and (is_spread or node % num_tasks in self._done_early):
                if not is_spread:
                    clock[self.before.chain[node]] = self.before.position[node]
                continue
            if not is_spread:
                if not clock.any() and node >= num_tasks:
                    known: VectorClock = table[node]
                    return known
                np.maximum(clock, table[node], out=clock)
                break
            np.maximum(clock, table[node], out=clock)
            clock[self.before.chain[node]] = 0  # other workers may still run their copies
        if self.before.signals.barriers:
            self.before.acquire(clock, self.before.signals.barriers[rank], 1)
        return clock


def _polled(spans: tuple[Span, ...]) -> Polled:
    return frozenset(span[1:4] for span in spans if span.polls)


def _backwards(queue: Ints, index: int, num_tasks: int) -> Iterator[int]:
    """The nodes before position `index` of a queue, nearest first: the second iteration's, then all of the first iteration."""
    for task in queue[:index][::-1]:
        yield int(task) + num_tasks
    yield from map(int, queue[::-1])
