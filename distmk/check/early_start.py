"""What has happened when a task may start before its waits are met.

A worker starts a task when the body of the previous one in its queue is done and the waits of the one before that are met;
with `deep_lookahead`, those of the one two before. A task that polls its inputs acts on them, and the worker may go on to its
next task, before the waits of the polling one are met; so may it after a task that has nothing to do. No task fires a trigger
before its waits are met.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distmk.check.bounds import Span
from distmk.check.happens_before import HappensBefore
from distmk.program.reader import Ints
from distmk.sync.vector_clock import VectorClock

Polled = frozenset[tuple[int, int, int]]  # location, begin, end of spans that a task polls


class EarlyStart:
    """Vector clocks of the tasks of the second iteration at the moment when their workers may start them."""

    def __init__(self, before: HappensBefore) -> None:
        self.before, self.tables = before, before.tables
        accesses = before.accesses
        self.polls = {task: polled for task, spans in enumerate(accesses.spans) if (polled := _polled(spans))}
        # Tasks that a worker may be done with before their waits are met.
        self._done_early = {*self.polls, *accesses.skippable}
        self._skips_waits = np.isin(np.arange(self.tables.num_tasks), accesses.skips_waits)
        self.queued = (
            self.tables.tasks.worker >= 0
        ) | self.tables.tasks.spread  # whether a worker's queue has the task
        self._index = np.zeros(self.tables.num_tasks, np.int64)  # in its worker's queue
        for queue in self.tables.queues:
            self._index[queue] = np.arange(len(queue))

    def clock(self, task: int) -> VectorClock:
        """When a task that is in a queue may start; a spread one, on the first of the workers to start it."""
        rank, num_workers = self.before.rank_of[task], self.tables.num_workers
        queues = self.tables.queues[rank * num_workers : (rank + 1) * num_workers]
        if not self.tables.tasks.spread[task]:
            return self._behind(queues[self.tables.tasks.worker[task]], int(self._index[task]), rank)
        clocks = [self._behind(queue, int(np.flatnonzero(queue == task)[0]), rank) for queue in queues]
        earliest: VectorClock = np.minimum.reduce(clocks)
        return earliest

    def write_clock(self, task: int) -> VectorClock:
        """When a polling task may write: it has polled its inputs.

        A task that skips its waits has then seen what the producers of its events wrote after their own waits, unless those
        poll, too.
        """
        clock: VectorClock = self.clock(task).copy()
        for event, lag in self.before.signals.waits[task] if self._skips_waits[task] else ():
            if not lag and not any(producer in self.polls for producer in self.before.signals.producers[event]):
                self.before.acquire(clock, event, 1)
        return clock

    def _behind(self, queue: Ints, index: int, rank: int) -> VectorClock:
        """The clock of a worker that has come to position `index` of its queue.

        It has the tasks before in the queue, what its copies of spread tasks waited for, and the iteration barrier. Of the
        last task, or last two with deep lookahead, only that they are done, if they are of the same iteration and may be done
        before their waits are met.
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
    """The nodes before position `index` of a queue, the nearest first: of the second iteration, then of the first."""
    for task in queue[:index][::-1]:
        yield int(task) + num_tasks
    yield from map(int, queue[::-1])
