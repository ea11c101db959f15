"""A slow second verdict on small programs, which shares no method with distmk.check.

It simulates a few iterations event by event to find deadlocks (simulation.py), and decides happens-before by plain
reachability over the unrolled program: a task starts (S), has read (R), has written to each rank, and is done (D).

A task that may idle may signal before its waits are met: what it did is then known to have happened (I, R, writes, D), but not S,
which stands for its waits.

A spread task stands in every worker's queue. Its waits and triggers are those of every copy; in happens-before the first copy
stands for all, and no queue orders it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from support.oracle_contents import meaning_faults
from support.oracle_lamport import Run, Trace, arrival_faults, known_when_looking, touches_early
from support.oracle_layout import OracleLayout
from support.simulation import ITERATIONS, Event, Simulation, Task

from distmk.abi import NO_EVENT, LaunchKind
from distmk.program.program import Program
from distmk.tasks import TASK_TYPES

HEADER_FIELDS = (
    "num_ranks",
    "num_workers",
    "num_schedulers",
    "jit_capacity",
    "zeroed_heap_bytes",
    "events_heap_offset",
    "rings_heap_offset",
    "heap_bytes",
)


class Oracle:
    """`faults`: the kinds of fault of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = program.ranks
        self.faults: set[str] = set()
        self.every: dict[Task, Any] = {
            (rank, index): desc for rank, part in enumerate(self.ranks) for index, desc in enumerate(part.tasks)
        }
        self.tasks = dict(self.every)  # without all copies but the first
        self.has_step = any(desc.launch == LaunchKind.SCHEDULER for desc in self.every.values())
        self._headers()
        self._copies()
        self._events()
        layout = OracleLayout(program, self.tasks, self.has_step)
        self.runs = layout.runs
        self.faults |= layout.faults
        if not self.faults:
            self.faults |= meaning_faults(self)
        if not self.faults:
            self._simulate()
        if not self.faults:
            self._reach()
            self._counting()
            self._conflicts()
            if arrival_faults(self):
                self.faults.add("arrival")

    def _headers(self) -> None:
        for rank, part in enumerate(self.ranks):
            same = all(getattr(part.header, f) == getattr(self.ranks[0].header, f) for f in HEADER_FIELDS)
            if part.header.rank != rank or not same:
                self.faults.add("header")

    def _copies(self) -> None:
        """Every worker's queue has a spread task once, and all copies are equal."""
        self.first_of: dict[Task, Task] = {}
        for rank, part in enumerate(self.ranks):
            held: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for worker, queue in enumerate(part.queues):
                for index in range(queue.begin, queue.begin + queue.count):
                    if part.tasks[index].launch == LaunchKind.SPREAD:
                        held[part.tasks[index].order].append((worker, index))
            for copies in held.values():
                self.first_of |= {(rank, index): (rank, copies[0][1]) for _, index in copies}
                if [worker for worker, _ in copies] != list(range(part.header.num_workers)):
                    self.faults.add("spread")
                first = self.tasks[(rank, copies[0][1])]
                if first.first_worker >= part.header.num_workers:
                    self.faults.add("spread")
                for _, index in copies[1:]:
                    if bytes(self.tasks.pop((rank, index))) != bytes(first):
                        self.faults.add("spread")

    def waits(self, task: Task) -> list[Any]:
        desc = self.every[task]
        return [self.ranks[task[0]].waits[desc.wait_begin + i] for i in range(desc.num_waits)]

    def triggers(self, task: Task) -> list[Any]:
        desc = self.every[task]
        return [self.ranks[task[0]].triggers[desc.trigger_begin + i] for i in range(desc.num_triggers)]

    def firings(self, task: Task) -> int:
        desc, header = self.tasks[task], self.ranks[0].header
        if desc.launch == LaunchKind.SPREAD:
            return int(header.num_workers)
        return int(desc.max_instances * header.num_schedulers) if desc.launch == LaunchKind.MASSIVE else 1

    def _events(self) -> None:
        self.totals: dict[Event, int] = defaultdict(int)
        self.producers: dict[Event, set[Task]] = defaultdict(set)
        sizes = [part.header.num_events for part in self.ranks]
        for task in self.tasks:
            for trigger in self.triggers(task):
                if trigger.rank >= len(self.ranks) or trigger.event >= sizes[trigger.rank]:
                    self.faults.add("event")
                    continue
                self.totals[(trigger.rank, trigger.event)] += trigger.amount * self.firings(task)
                if trigger.amount:
                    self.producers[(trigger.rank, trigger.event)].add(task)
        for task in self.tasks:
            for wait in self.waits(task):
                if wait.event >= sizes[task[0]]:
                    self.faults.add("event")
                elif wait.count != self.totals[(task[0], wait.event)] or not wait.count:
                    self.faults.add("threshold")
                if wait.lag > 1:
                    self.faults.add("lag")
        opener = [task for task, desc in self.tasks.items() if desc.launch == LaunchKind.SCHEDULER]
        for rank, part in enumerate(self.ranks):
            gate = part.header.iteration_event
            if gate == NO_EVENT:
                if opener:
                    self.faults.add("iteration barrier")
            elif self.totals[(rank, gate)] != 1 or self.producers[(rank, gate)] != set(opener):
                self.faults.add("iteration barrier")

    def _simulate(self) -> None:
        if not Simulation(self.program).finishes():
            self.faults.add("deadlock")

    def _reach(self) -> None:
        """`past[node]`: all nodes before it, as the bits of an int. Nodes: (task, iteration, "S", "R", rank or "D")."""
        before: dict[Any, list[Any]] = defaultdict(list)
        self.targets = {t: sorted({run[1] for run in runs if run[0]}) for t, runs in self.runs.items()}
        last: dict[tuple[int, int], list[Any]] = {}
        # The tasks that a worker has gone through; and the trails of all workers as they come to a task.
        trails: dict[tuple[int, int], list[Trace]] = defaultdict(list)
        self.trails: dict[tuple[Task, int], list[list[Trace]]] = defaultdict(list)
        for i in range(ITERATIONS):
            for task in self.tasks:
                begin = self.begin(task)
                before[(task, i, "R")].append((task, i, begin))
                for rank in self.targets[task]:
                    before[(task, i, rank)].append((task, i, "R"))
                before[(task, i, "D")] += [(task, i, x) for x in ("R", *self.targets[task])]
                for wait in self.waits(task):
                    if i >= wait.lag:
                        event = (task[0], wait.event)
                        before[(task, i, "S")] += [self.told(p, i - wait.lag, event) for p in self.producers[event]]
                gate = self.ranks[task[0]].header.iteration_event
                if gate != NO_EVENT and self.tasks[task].launch != LaunchKind.SCHEDULER:
                    event = (task[0], gate)
                    for start in {"S", begin}:
                        before[(task, i, start)] += [self.told(p, i, event) for p in self.producers[event]]
            for rank, part in enumerate(self.ranks):
                for worker, queue in enumerate(part.queues):
                    for index in range(queue.begin, queue.begin + queue.count):
                        spread = self.every[(rank, index)].launch == LaunchKind.SPREAD
                        task = self.first_of[(rank, index)] if spread else (rank, index)
                        self.trails[(task, i)].append(trails[(rank, worker)])
                        trails[(rank, worker)] = [*trails[(rank, worker)], (task, i, spread)]
                        if spread:
                            continue
                        for start in {"S", self.begin((rank, index))}:
                            before[((rank, index), i, start)] += last.get((rank, worker), [])
                        last[(rank, worker)] = [((rank, index), i, node) for node in ("D", "S")]
        self.past: dict[Any, int] = {}
        self.bit: dict[Any, int] = {}
        self.known: dict[tuple[Task, int, bool], int] = {}  # what `known_when_looking` has found
        for node in list(before):
            self._close(node, before)

    def begin(self, task: Task) -> str:
        """The node at which a task begins, by what is known to those that it signals."""
        return "I" if TASK_TYPES[self.tasks[task].type].may_idle else "S"

    def told(self, producer: Task, iteration: int, event: Event) -> Any:
        """The node that has happened once `producer` has signaled `event`."""
        early = event[0] != producer[0] and event[0] in self.targets[producer]
        return (producer, iteration, event[0] if early else "D")

    def _close(self, root: Any, before: dict[Any, list[Any]]) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            todo = [b for b in before.get(node, ()) if b not in self.past]
            if todo:
                stack += todo
                continue
            stack.pop()
            if node in self.past:
                continue
            self.bit[node] = 1 << len(self.bit)
            past = 0
            for b in before.get(node, ()):
                past |= self.past[b] | self.bit[b]
            self.past[node] = past

    def is_before(self, node: Any, later: Any) -> bool:
        return bool(self.past[later] & self.bit[node])

    def _is_over(self, node: Any, later: Task, i: int, early: bool) -> bool:
        """Whether `node` has happened when a task makes an access; `early`: one that may come before its waits are met."""
        known = known_when_looking(self, later, i, acts=True) if early else self.past[(later, i, "S")]
        return bool(known & self.bit[node])

    def _counting(self) -> None:
        awaited = {(task[0], wait.event) for task in self.tasks for wait in self.waits(task)}
        for rank, part in enumerate(self.ranks):
            if part.header.iteration_event != NO_EVENT:
                awaited.add((rank, part.header.iteration_event))
        for event in awaited:
            for slow in self.producers[event]:
                told = self.told(slow, 0, event)[2]
                facts = ["R", *(self.targets[slow] if told == "D" else [told])]
                for fast in self.producers[event]:
                    for i in range(ITERATIONS - 1):
                        if not all(self.is_before((slow, i, fact), (fast, i + 1, self.begin(fast))) for fact in facts):
                            self.faults.add("counting")

    def _conflicts(self) -> None:
        pairs: set[tuple[Task, Any, bool, Task, Any, bool]] = set()
        memories: dict[tuple[int, int], list[tuple[Task, Run]]] = defaultdict(list)
        for task, runs in self.runs.items():
            for run in runs:
                memories[(run.rank, run.space)].append((task, run))
        for (a, x), (b, y) in itertools.chain(*(itertools.product(uses, uses) for uses in memories.values())):
            if (x.write or y.write) and x.begin < y.end and y.begin < x.end:
                first = (a, x.rank if x.write else "R", touches_early(self, a, x, y))
                pairs.add((*first, b, y.rank if y.write else "R", touches_early(self, b, y, x)))
        for a, a_did, a_early, b, b_did, b_early in pairs:
            for i in range(ITERATIONS):
                for j in range(i, ITERATIONS):
                    if (a, i) == (b, j):
                        continue
                    forth = self._is_over((a, i, a_did), b, j, b_early)
                    if not forth and not self._is_over((b, j, b_did), a, i, a_early):
                        self.faults.add("race")
                        return
