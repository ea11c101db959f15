"""Waits and triggers of a graph, from the overlap of the regions that its tasks read and write.

Walks the tasks twice in program order, as iterations 0 and 1, remembering who last wrote and since read each part of
every buffer. A conflict that queue order, the iteration's gate or another wait already orders needs no wait of its own.
What is left becomes events: one counter for each set of tasks that somebody on a rank waits for.

A push fires the events of its rank with its data, before the task is done elsewhere. So what a task that writes to
several ranks left on a rank is known there by an event of that rank only (or once the whole task is known to be done):
it is not enough to know some third task that came after another of its pushes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from distmk.abi import LaunchKind
from distmk.clocks import Clock, Clocks
from distmk.errors import UsageError
from distmk.graph import Graph
from distmk.intervals import IntervalLog
from distmk.regions import Buffer, Region
from distmk.tasks import Prepare, Task


@dataclass(frozen=True)
class Event:
    """A counter on `rank`: every iteration adds `count`, by tasks `producers`."""

    rank: int
    index: int
    producers: tuple[int, ...]
    count: int


@dataclass
class Wiring:
    """Waits (event, lag) and triggered events of every task, and every rank's events."""

    waits: list[list[tuple[Event, int]]]
    triggers: list[list[Event]]
    events: list[list[Event]]
    gates: list[Event] = field(default_factory=list)  # by rank; empty where iterations are counted


@dataclass(frozen=True, eq=False)
class _Dependency:
    """Nodes that must be done first; `need` is the clock that says so, `latest` the last of them in program order.

    Of the `pushes` among them only what they left on rank `place` matters; a clock alone does not say that it has come.
    """

    nodes: tuple[int, ...]
    need: Clock
    latest: int
    place: int
    pushes: tuple[int, ...]


Made = dict[tuple[int, tuple[int, ...]], list[Event]]  # events of a rank by their producers
NOWHERE: frozenset[int] = frozenset()
NO_PLACE = -1  # of a dependency on readers
Conflict = tuple[tuple[int, ...], int]  # nodes, and the rank whose memory they wrote


def instances_of(task: Task, num_schedulers: int) -> int:
    """How often one trigger of `task` is fired an iteration: every scheduler answers for all of a massive launch."""
    return task.max_instances() * num_schedulers if task.launch is LaunchKind.MASSIVE else 1


def derive(graph: Graph) -> Wiring:
    """The wiring of `graph`; UsageError if a queue is too long."""
    return _Derivation(graph).run()


class _Derivation:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_tasks = len(graph.tasks)
        targets = [frozenset(region.rank for region in task.writes()) for task in graph.tasks]
        # Ranks whose events may hear of a task before it is done, because it pushes to them and writes elsewhere too.
        ranks = (task.rank for task in graph.tasks)
        self.pushed = [to - {rank} if len(to) > 1 else NOWHERE for to, rank in zip(targets, ranks, strict=True)]
        placements = [(task.rank, task.worker if task.launch is LaunchKind.AHEAD else None) for task in graph.tasks]
        spread = np.array([len(to) > 1 for to in targets], np.bool_)
        self.clocks = Clocks(placements, graph.num_workers, graph.num_ranks, spread)
        self.readers: dict[tuple[Buffer, int], IntervalLog] = defaultdict(IntervalLog)
        self.writers: dict[tuple[Buffer, int], IntervalLog] = defaultdict(IntervalLog)
        self.known: dict[Conflict, _Dependency] = {}
        self.unions: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.joins: dict[tuple[tuple[int, ...], int], tuple[Clock, list[int]]] = {}
        # By (node, rank): who waited there for its push.
        self.arrivals: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.gate = next((i for i, task in enumerate(graph.tasks) if isinstance(task, Prepare)), None)
        self.kept: list[list[_Dependency]] = []

    def run(self) -> Wiring:
        last_on_chain: dict[int, int] = {}
        for iteration in (0, 1):
            self.kept = []
            for index, task in enumerate(self.graph.tasks):
                node = index + iteration * self.num_tasks
                clock = np.zeros(self.clocks.num_chains, np.uint16)
                before = last_on_chain.get(int(self.clocks.chain[node]))
                if before is not None:
                    clock[:] = self.clocks.table[before]
                if self.gate is not None and index != self.gate:
                    gate = self._heard((self.gate + iteration * self.num_tasks,), task.rank)
                    np.maximum(clock, gate[0], out=clock)
                self.kept.append(self._prune(clock, self._conflicts(task, node), node))
                self.clocks.settle(node, clock)
                last_on_chain[int(self.clocks.chain[node])] = node
        return self._wire()

    def _heard(self, nodes: tuple[int, ...], rank: int) -> tuple[Clock, list[int]]:
        """What a wait on `rank` for `nodes` tells, and of which of them it tells no more than their push."""
        heard = self.joins.get((nodes, rank))
        if heard is None:
            early = [node for node in nodes if rank in self.pushed[node % self.num_tasks]]
            done = [node for node in nodes if node not in early] if early else nodes
            heard = self.joins[(nodes, rank)] = self.clocks.join(done, early), early
        return heard

    def _conflicts(self, task: Task, node: int) -> set[Conflict]:
        """Sets of nodes that `node` conflicts with and comes after; records its own accesses."""
        found: set[Conflict] = set()
        reads, writes = list(task.reads()), list(task.writes())
        for region in reads:
            found.add((self._last_writers(region), region.rank))
        for region in writes:
            place = (region.buffer, region.rank)
            for log, at in ((self.readers[place], NO_PLACE), (self.writers[place], region.rank)):
                found.update((entry.freeze(), at) for entry in log.overlapping(region.begin, region.end))
        if node >= self.num_tasks and task.launch in (LaunchKind.SINGLE, LaunchKind.MASSIVE):
            # Its triggers of two iterations must not mix, and no queue keeps them apart.
            found.add(((node - self.num_tasks,), task.rank))
        for region in writes:
            place = (region.buffer, region.rank)
            for log in (self.readers[place], self.writers[place]):
                log.cut(region.begin, region.end)
            self.writers[place].add(region.begin, region.end, node)
        for region in reads:
            self.readers[(region.buffer, region.rank)].add(region.begin, region.end, node)
        return {conflict for conflict in found if conflict[0]}

    def _last_writers(self, region: Region) -> tuple[int, ...]:
        log = self.writers[(region.buffer, region.rank)]
        key = (region.buffer.index, region.rank, region.begin, region.end, log.version)
        if key not in self.unions:
            entries = log.overlapping(region.begin, region.end)
            self.unions[key] = tuple(sorted({node for entry in entries for node in entry.nodes}))
        return self.unions[key]

    def _prune(self, clock: Clock, found: set[Conflict], node: int) -> list[_Dependency]:
        """Dependencies that `clock` does not imply yet, latest first; raises `clock` by those kept."""
        kept = []
        rank = self.graph.tasks[node % self.num_tasks].rank
        dependencies = (self._dependency(nodes, place) for nodes, place in found)
        for dependency in sorted(dependencies, key=lambda d: (d.latest, d.place), reverse=True):
            if node in dependency.nodes:  # a task is after itself
                others = tuple(n for n in dependency.nodes if n != node)
                if not others:
                    continue
                dependency = self._dependency(others, dependency.place)
            if self._knows(clock, dependency, rank):
                continue
            kept.append(dependency)
            heard, pushes = self._heard(dependency.nodes, rank)
            np.maximum(clock, heard, out=clock)
            for pushed in pushes:
                self.arrivals[(pushed, rank)].append(node)
            if dependency.place != rank and not self._knows(clock, dependency, rank):
                names = ", ".join(sorted({self.graph.tasks[n % self.num_tasks].op for n in dependency.nodes})[:3])
                raise UsageError(
                    f"task {self.graph.tasks[node % self.num_tasks].op} on rank {rank} overwrites what {names} left on "
                    f"rank {dependency.place}, of which rank {rank} cannot hear; "
                    f"have a task on rank {dependency.place} read it in between"
                )
        return kept

    def _knows(self, clock: Clock, dependency: _Dependency, rank: int) -> bool:
        """Whether a task of `rank` with `clock` behind it comes after `dependency`."""
        if not (clock >= dependency.need).all():
            return False
        for node in dependency.pushes:
            if self.clocks.happened(node, clock) or (node % self.num_tasks == self.gate and dependency.place == rank):
                continue
            if not any(self.clocks.started(waiter, clock) for waiter in self.arrivals[(node, dependency.place)]):
                return False
        return True

    def _dependency(self, nodes: tuple[int, ...], place: int) -> _Dependency:
        known = self.known.get((nodes, place))
        if known is None:
            last: dict[int, int] = {}
            for node in nodes:  # of several tasks on one chain the last speaks for all
                chain = int(self.clocks.chain[node])
                last[chain] = max(last.get(chain, -1), node)
            speakers = tuple(sorted(last.values()))
            pushes = tuple(node for node in speakers if place in self.pushed[node % self.num_tasks])
            early = speakers if place == NO_PLACE else pushes
            need = self.clocks.before_all([node for node in speakers if node not in early], early)
            known = self.known[(nodes, place)] = _Dependency(speakers, need, max(nodes), place, pushes)
        return known

    def _wire(self) -> Wiring:
        wiring = Wiring(
            waits=[[] for _ in self.graph.tasks],
            triggers=[[] for _ in self.graph.tasks],
            events=[[] for _ in range(self.graph.num_ranks)],
        )
        made: Made = {}
        if self.gate is not None:
            for rank in range(self.graph.num_ranks):
                event = self._events(wiring, made, rank, (self.gate,))[0]
                wiring.gates.append(event)
        for index, dependencies in enumerate(self.kept):
            rank = self.graph.tasks[index].rank
            for dependency in dependencies:
                for lag in (0, 1):
                    first = 0 if lag else self.num_tasks
                    producers = tuple(n - first for n in dependency.nodes if first <= n < first + self.num_tasks)
                    if producers:
                        events = self._events(wiring, made, rank, producers)
                        waits = wiring.waits[index]
                        waits += [(event, lag) for event in events if (event, lag) not in waits]
        return wiring

    def _events(self, wiring: Wiring, made: Made, rank: int, producers: tuple[int, ...]) -> list[Event]:
        """The events on `rank` that together say that `producers` are done: one, unless that could miscount."""
        key = (rank, producers)
        if key not in made:
            groups = [producers] if self._counts_safely(producers, rank) else [(producer,) for producer in producers]
            made[key] = []
            for group in groups:
                if (rank, group) in made and group != producers:
                    made[key] += made[(rank, group)]
                    continue
                count = sum(instances_of(self.graph.tasks[p], self.graph.num_schedulers or 1) for p in group)
                event = Event(rank, len(wiring.events[rank]), group, count)
                wiring.events[rank].append(event)
                for producer in group:
                    wiring.triggers[producer].append(event)
                made[key].append(event)
        return made[key]

    def _counts_safely(self, producers: tuple[int, ...], rank: int) -> bool:
        """A sum of counts stands for all producers only if none can run an iteration ahead of another."""
        if len(producers) == 1:
            return True
        all_of_them = self._dependency(producers, rank)
        tasks = self.graph.tasks
        return all(self._knows(self.clocks.table[p + self.num_tasks], all_of_them, tasks[p].rank) for p in producers)
