"""Waits and triggers of a graph, from the overlap of the regions that its tasks read and write.

Walks the tasks twice in program order, as iterations 0 and 1, remembering who last wrote and since read each part of
every buffer. A conflict that queue order, the iteration's gate or another wait already orders needs no wait of its own.
What is left becomes events: one counter for each set of tasks that somebody on a rank waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from distmk.abi import LaunchKind
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.sync.access_log import Footprint
from distmk.sync.happens_before import NO_PLACE, Dependency, History
from distmk.sync.interval_map import Group
from distmk.tasks import Task


@dataclass(frozen=True)
class Event:
    """A counter on `rank`: every iteration adds `count`, by tasks `producers`.

    `spans_ranks`: some of them are on other ranks, which calls for a wider memory scope on a GPU.
    """

    rank: int
    index: int
    producers: tuple[int, ...]
    count: int
    spans_ranks: bool = False


@dataclass
class Wiring:
    """Waits (event, lag) and triggered events of every task, and every rank's events."""

    waits: list[list[tuple[Event, int]]]
    triggers: list[list[Event]]
    events: list[list[Event]]
    gates: list[Event] = field(default_factory=list)  # by rank; empty where iterations are counted


_AGE = attrgetter("age")
Made = dict[tuple[int, tuple[int, ...]], list[Event]]  # events of a rank by their producers


def firings_of(task: Task, graph: Graph) -> int:
    """How often one trigger of `task` is fired an iteration: every worker answers for its share of a spread task, every
    scheduler for all of a massive launch.
    """
    if task.launch is LaunchKind.SPREAD:
        return graph.num_workers
    return task.max_instances() * (graph.num_schedulers or 1) if task.launch is LaunchKind.MASSIVE else 1


def derive(graph: Graph) -> Wiring:
    """The wiring of `graph`; UsageError if a queue is too long, or a task overwrites what it cannot hear of."""
    return _Derivation(graph).run()


Touched = list[tuple[Footprint, int, int]]  # intervals that a task reads or writes


class _Derivation:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_tasks = len(graph.tasks)
        self.firings = [firings_of(task, graph) for task in graph.tasks]
        writes = [list(task.writes()) for task in graph.tasks]
        self.history = History(graph, [frozenset(region.rank for region in regions) for regions in writes])
        self.footprints: dict[tuple[Buffer, int], Footprint] = {}
        # What a task both reads and writes is ordered by the write alone.
        reads = [
            [r for r in task.reads() if r not in regions] for task, regions in zip(graph.tasks, writes, strict=True)
        ]
        self.reads = [self._touched(regions) for regions in reads]
        self.writes = [self._touched(regions) for regions in writes]
        self.kept: list[list[Dependency]] = []

    def _touched(self, regions: Iterable[Region]) -> Touched:
        touched = []
        for buffer, rank, begin, end in regions:
            footprint = self.footprints.get((buffer, rank))
            if footprint is None:
                footprint = self.footprints[(buffer, rank)] = Footprint(rank, self.history)
            touched.append((footprint, begin, end))
        return touched

    def run(self) -> Wiring:
        for iteration in (0, 1):
            self.kept = []
            for index in range(self.num_tasks):
                node = index + iteration * self.num_tasks
                self.history.enter(node)
                self.kept.append(self._prune(node, self._conflicts(index, node)))
                self.history.settle(node)
        return self._wire()

    def _conflicts(self, index: int, node: int) -> list[Dependency]:
        """What `node` conflicts with and comes after; records its own accesses."""
        found: list[Dependency] = []
        history, task = self.history, self.graph.tasks[index]
        reading = Group([node], history.single(node, NO_PLACE), shared=True)
        for footprint, begin, end in self.reads[index]:
            writers = footprint.read(begin, end, reading)
            if writers is not None and writers.nodes != history.gate_alone:
                found.append(writers)
        if node >= self.num_tasks and task.launch not in (LaunchKind.AHEAD, LaunchKind.SCHEDULER):
            # Its triggers of two iterations must not mix, and no one queue keeps them apart.
            found.append(history.single(node - self.num_tasks, task.rank))
        for footprint, begin, end in self.writes[index]:
            found += footprint.write(begin, end, node)
        return found

    def _prune(self, node: int, found: list[Dependency]) -> list[Dependency]:
        """Dependencies that the clock of `node` does not imply yet, latest first; raises it by those kept."""
        kept: list[Dependency] = []
        found.sort(key=_AGE, reverse=True)
        for dependency in found:
            if self.history.knows(node, dependency):
                continue
            if any(dependency.age == other.age and dependency.nodes == other.nodes for other in kept):
                continue
            kept.append(dependency)
            self.history.wait(node, dependency)
            if dependency.place != self.graph.tasks[node % self.num_tasks].rank:
                self._check_heard(node, dependency)
        return kept

    def _check_heard(self, node: int, dependency: Dependency) -> None:
        if self.history.knows(node, dependency):
            return
        tasks = self.graph.tasks
        task = tasks[node % self.num_tasks]
        names = ", ".join(sorted({tasks[n % self.num_tasks].op for n in dependency.nodes})[:3])
        raise UsageError(
            f"task {task.op} on rank {task.rank} overwrites what {names} left on "
            f"rank {dependency.place}, of which rank {task.rank} cannot hear; "
            f"have a task on rank {dependency.place} read it in between"
        )

    def _wire(self) -> Wiring:
        wiring = Wiring(
            waits=[[] for _ in self.graph.tasks],
            triggers=[[] for _ in self.graph.tasks],
            events=[[] for _ in range(self.graph.num_ranks)],
        )
        made: Made = {}
        if self.history.gate is not None:
            for rank in range(self.graph.num_ranks):
                event = self._events(wiring, made, rank, (self.history.gate,))[0]
                wiring.gates.append(event)
        awaited: dict[tuple[Dependency, int], list[tuple[Event, int]]] = {}
        for index, dependencies in enumerate(self.kept):
            rank, waits = self.graph.tasks[index].rank, wiring.waits[index]
            for dependency in dependencies:
                events = awaited.get((dependency, rank))
                if events is None:
                    events = awaited[(dependency, rank)] = self._awaited(wiring, made, rank, dependency)
                waits += [wait for wait in events if wait not in waits]
        return wiring

    def _awaited(self, wiring: Wiring, made: Made, rank: int, dependency: Dependency) -> list[tuple[Event, int]]:
        """What a task on `rank` waits for to come after `dependency`: events and lags."""
        this = tuple([node - self.num_tasks for node in dependency.nodes if node >= self.num_tasks])
        last = tuple([node for node in dependency.nodes if node < self.num_tasks])
        return [
            (event, lag)
            for lag, producers in ((0, this), (1, last))
            if producers
            for event in self._events(wiring, made, rank, producers)
        ]

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
                count = sum([self.firings[p] for p in group])
                spans_ranks = any([self.history.rank_of[p] != rank for p in group])
                event = Event(rank, len(wiring.events[rank]), group, count, spans_ranks)
                wiring.events[rank].append(event)
                for producer in group:
                    wiring.triggers[producer].append(event)
                made[key].append(event)
        return made[key]

    def _counts_safely(self, producers: tuple[int, ...], rank: int) -> bool:
        """A sum of counts stands for all producers only if none can run an iteration ahead of another."""
        if len(producers) == 1:
            return True
        all_of_them = self.history.dependency(producers, rank)
        return all(self.history.knows(p + self.num_tasks, all_of_them) for p in producers)
