"""Happens-before between the tasks of two consecutive iterations, as vector clocks.

Two iterations are enough. Events lead from an iteration to itself or to the next one, so two iterations give the order
of any two tasks of the same or of adjacent iterations. If two conflicting tasks are two iterations apart, the writing
task also ran in the iteration between them and is ordered against both.

A push signals events of the receiving rank together with its data. At that moment the pushing task has read all that it
reads, but its writes to other ranks may still be under way. A waiter for such an event therefore knows only two things:
the task has read, and it has written to the waiter's rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from distmk.check.bounds import Accesses
from distmk.check.thresholds import Signals
from distmk.program.reader import Ints, ProgramTables
from distmk.sync.vector_clock import VectorClock, VectorClocks

READ = -1  # stands where the written rank would be
NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Requirement:
    """What must have happened: `nodes` have read, or have written to one rank (or to all ranks).

    A clock meets the requirement if it is at least `clock` and all `pushes` (pairs of a node and a rank) have landed.
    The clock alone does not say whether a push has landed.
    """

    nodes: tuple[int, ...]
    clock: VectorClock
    pushes: list[tuple[int, int]]


class HappensBefore:
    """The vector clocks of a program. A node is a task in iteration 0 (its number) or 1 (its number + num_tasks)."""

    def __init__(self, tables: ProgramTables, signals: Signals, accesses: Accesses, order: list[int]) -> None:
        """`order`: the tasks in an order in which an iteration can run them."""
        self.tables, self.signals, self.accesses, self.order = tables, signals, accesses, order
        self.num_tasks = tables.num_tasks
        targets = accesses.targets
        owners = zip(tables.tasks.rank.tolist(), tables.tasks.worker.tolist(), strict=True)
        placements = [(rank, worker if worker >= 0 else None) for rank, worker in owners]
        several = np.array([len(ranks) > 1 for ranks in targets], np.bool_)
        self.clocks = VectorClocks(placements, tables.num_workers, tables.num_ranks, several)
        self.rank_of: list[int] = tables.tasks.rank.tolist()
        # For each task: the other ranks that it pushes to, if it writes to several ranks. An event there proves only its push
        # to that rank.
        self.pushed = [
            ranks - {rank} if len(ranks) > 1 else NONE for ranks, rank in zip(targets, self.rank_of, strict=True)
        ]
        self.chain: list[int] = self.clocks.chain.tolist()
        self.position: list[int] = self.clocks.position.tolist()  # position of a node that is done
        self.early: list[int] = self.clocks.early.tolist()  # position of a node that has read and signaled by pushes
        self._event_rank: list[int] = tables.event_rank.tolist()
        self._acquired: dict[tuple[int, int], VectorClock] = {}
        self._requirements: dict[tuple[tuple[int, ...], int], Requirement] = {}
        self._waiters: dict[tuple[int, int], Ints] = {}
        self._events_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # by task and the event's rank
        for event, producers in signals.producers.items():
            for task in producers:
                self._events_of[(task, self._event_rank[event])].append(event)
        self._run()

    def _run(self) -> None:
        """Compute the clocks of all nodes, in program order."""
        last: dict[int, int] = {}  # by chain: its last node
        clocks, barriers, step = self.clocks, self.signals.barriers, self.signals.scheduler_step
        table, chain, waits, may_idle = clocks.table, self.chain, self.signals.waits, self.accesses.may_idle
        for iteration in (0, 1):
            first = iteration * self.num_tasks
            for task in self.order:
                node = task + first
                before = last.get(chain[node], -1)
                clock = table[node]
                if before >= 0:
                    clock[:] = table[before]
                # A task behind another one of its worker in this iteration has the barrier from that one.
                if barriers and before < first and task != step:
                    self.acquire(clock, barriers[self.rank_of[task]], iteration)
                if task in may_idle:
                    clocks.settle_idle(node, clock)
                for event, lag in waits[task]:
                    if lag <= iteration:
                        self.acquire(clock, event, iteration - lag)
                clocks.settle(node)
                last[chain[node]] = node

    def acquire(self, clock: VectorClock, event: int, iteration: int) -> None:
        """Raise `clock` by what a wait for `event` acquires."""
        producers = self.signals.producers[event]
        if len(producers) > 1:
            np.maximum(clock, self._acquired_of_many(event, iteration), out=clock)
            return
        node = producers[0] + iteration * self.num_tasks
        chain, is_push = self.chain[node], self._event_rank[event] in self.pushed[producers[0]]
        behind = max(int(clock[chain]), self.early[node]) if is_push else 0
        np.maximum(clock, self.clocks.when_signaled(node), out=clock)
        if is_push:
            clock[chain] = behind

    def _acquired_of_many(self, event: int, iteration: int) -> VectorClock:
        """The clock that a wait for an event of several producers acquires."""
        clock = self._acquired.get((event, iteration))
        if clock is None:
            rank, first = self._event_rank[event], iteration * self.num_tasks
            producers = self.signals.producers[event]
            early = [task + first for task in producers if rank in self.pushed[task]]
            done = [task + first for task in producers if rank not in self.pushed[task]]
            clock = self._acquired[(event, iteration)] = self.clocks.join(done, early)
        return clock

    def requirement(self, nodes: tuple[int, ...], rank: int) -> Requirement:
        """The requirement that all `nodes` have written to `rank` or, if `rank` is READ, have read."""
        known = self._requirements.get((nodes, rank))
        if known is None:
            if rank == READ:
                known = Requirement(nodes, self.clocks.before_all((), nodes), [])
            else:
                early = [node for node in nodes if rank in self.pushed[node % self.num_tasks]]
                done = [node for node in nodes if node not in early] if early else nodes
                clock = self.clocks.before_all(done, early)
                known = Requirement(nodes, clock, [(node, rank) for node in early])
            self._requirements[(nodes, rank)] = known
        return known

    def requirement_of_event(self, event: int) -> Requirement:
        """What `event` proves with its count of iteration 0: pushed data has landed; producers without pushes are done."""
        rank = self._event_rank[event]
        nodes = self.signals.producers[event]
        done, pushes = [], []
        for task in nodes:
            if rank in self.pushed[task]:
                pushes.append((task, rank))
            elif self.pushed[task]:
                pushes += [(task, target) for target in sorted(self.accesses.targets[task])]
            else:
                done.append(task)
        return Requirement(nodes, self.clocks.before_all(done, [task for task, _ in pushes]), pushes)

    def after(self, node: int, requirement: Requirement, clock: VectorClock | None = None) -> bool:
        """Whether `requirement` holds when `node` starts. With `clock`: whether it holds at that clock already."""
        clock = self.clocks.table[node] if clock is None else clock
        if not (clock >= requirement.clock).all():
            return False
        return all(self._landed(node, clock, pusher, rank) for pusher, rank in requirement.pushes)

    def after_one(self, node: int, other: int, rank: int, clock: VectorClock | None = None) -> bool:
        """`after` for the requirement that one node has read (`rank` READ) or written to `rank`."""
        chain = self.chain[other]
        behind = int(self.clocks.table[node, chain] if clock is None else clock[chain])
        if behind >= self.position[other]:
            return True
        if behind < self.early[other]:
            return False
        if rank == READ:
            return True
        if rank not in self.pushed[other % self.num_tasks]:
            return False
        return self._landed(node, self.clocks.table[node] if clock is None else clock, other, rank)

    def _landed(self, node: int, clock: VectorClock, pusher: int, rank: int) -> bool:
        """Whether the writes of `pusher` to `rank` have landed: `pusher` is done, or a wait for its event on `rank` has
        been met.
        """
        if self.clocks.happened(pusher, clock):
            return True
        iteration, task = divmod(pusher, self.num_tasks)
        for event in self._events_of[(task, rank)]:
            if self._is_barrier_of(event, node, iteration):
                return True
            waiters = self._waiters_of(event, iteration)
            if (clock[self.clocks.chain[waiters]] >= self.clocks.early[waiters]).any():
                return True
        return False

    def _is_barrier_of(self, event: int, node: int, iteration: int) -> bool:
        """Whether `node` waited at `event` as its iteration barrier: a shortcut for the most frequent case."""
        rank = self.rank_of[node % self.num_tasks]
        barriers = self.signals.barriers
        return bool(barriers) and barriers[rank] == event and node // self.num_tasks == iteration

    def _waiters_of(self, event: int, iteration: int) -> Ints:
        """Nodes that start only after `event` has reached its count of `iteration`."""
        waiters = self._waiters.get((event, iteration))
        if waiters is None:
            tables, signals = self.tables, self.signals
            nodes = [
                task + (iteration + lag) * tables.num_tasks
                for task, lag in signals.waiters.get(event, ())
                if iteration + lag <= 1 and task not in self.accesses.may_idle
            ]
            if event in signals.barriers:
                rank = int(tables.event_rank[event])
                behind = range(int(tables.first_task[rank]), int(tables.first_task[rank + 1]))
                nodes += [task + iteration * tables.num_tasks for task in behind if task != signals.scheduler_step]
            waiters = self._waiters[(event, iteration)] = np.array(nodes, np.int64)
        return waiters

    def describe(self, node: int) -> str:
        """A task and its iteration, as text."""
        iteration, task = divmod(node, self.num_tasks)
        return f"{self.tables.describe_task(task)} in {'the next' if iteration else 'an'} iteration"
