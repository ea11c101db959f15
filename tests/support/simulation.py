"""Simulates a small program event by event, to find deadlocks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from distmk.abi import NO_EVENT, LaunchKind
from distmk.program.program import Program

ITERATIONS = 3
Task = tuple[int, int]  # rank, index
Event = tuple[int, int]


class Simulation:
    """Workers and schedulers make every possible step until none is left; then each must have run `ITERATIONS` times."""

    def __init__(self, program: Program) -> None:
        self.ranks = program.ranks
        self.counts: dict[Event, int] = defaultdict(int)
        header = self.ranks[0].header
        self.num_schedulers = header.num_schedulers
        every = range(len(self.ranks))
        self.workers = {(r, w): [0, 0] for r in every for w in range(header.num_workers)}
        self.schedulers = {(r, s): [0, 0, 0] for r in every for s in range(header.num_schedulers)}

    def finishes(self) -> bool:
        busy = True
        while busy:
            busy = False
            for (rank, worker), state in self.workers.items():
                while self._step_worker(rank, state, worker):
                    busy = True
            for (rank, me), place in self.schedulers.items():
                while self._step_scheduler(rank, place, me):
                    busy = True
        return all(state[0] == ITERATIONS for state in [*self.workers.values(), *self.schedulers.values()])

    def _desc(self, task: Task) -> Any:
        return self.ranks[task[0]].tasks[task[1]]

    def _met(self, task: Task, iteration: int) -> bool:
        part, desc = self.ranks[task[0]], self._desc(task)
        waits = [part.waits[desc.wait_begin + i] for i in range(desc.num_waits)]
        return all(self.counts[(task[0], w.event)] >= w.count * (iteration + 1 - w.lag) for w in waits)

    def _fire(self, task: Task, times: int = 1) -> None:
        part, desc = self.ranks[task[0]], self._desc(task)
        for i in range(desc.num_triggers):
            trigger = part.triggers[desc.trigger_begin + i]
            self.counts[(trigger.rank, trigger.event)] += trigger.amount * times

    def _gate(self, rank: int, iteration: int) -> bool:
        event = self.ranks[rank].header.iteration_event
        return event == NO_EVENT or self.counts[(rank, event)] > iteration

    def _step_worker(self, rank: int, state: list[int], worker: int) -> bool:
        if state[0] == ITERATIONS or not self._gate(rank, state[0]):
            return False
        queue = self.ranks[rank].queues[worker]
        if state[1] == queue.count:
            state[:] = [state[0] + 1, 0]
            return True
        task = (rank, queue.begin + state[1])
        if not self._met(task, state[0]):
            return False
        self._fire(task)
        state[1] += 1
        return True

    def _step_scheduler(self, rank: int, state: list[int], me: int) -> bool:
        if state[0] == ITERATIONS:
            return False
        launches = self.ranks[rank].launches
        task = (rank, launches[state[1]]) if state[1] < len(launches) else None
        kind = self._desc(task).launch if task else None
        scheduled, massive = kind == LaunchKind.SCHEDULER, kind == LaunchKind.MASSIVE
        if not scheduled and not state[2]:
            if not self._gate(rank, state[0]):
                return False
            state[2] = 1
        if not task:
            state[:] = [state[0] + 1, 0, 0]
            return True
        mine = me == 0 if scheduled else massive or state[1] % self.num_schedulers == me
        if mine:
            if not self._met(task, state[0]):
                return False
            self._fire(task, self._desc(task).max_instances if massive else 1)
        state[1] += 1
        return True
