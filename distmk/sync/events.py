"""Waits and triggers of a graph, derived from the overlap of the regions that its tasks read and write.

The tasks are walked twice in program order, as iterations 0 and 1, with a log of the last writer and the readers of
every interval of every buffer. A task must come after the tasks whose accesses conflict with its own. If list order,
the iteration barrier or another wait implies a dependency, it needs no wait. The other dependencies become events: one
counter on a rank for each set of tasks that some task of the rank waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from distmk.abi import LaunchKind
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.sync.access_log import AccessLog
from distmk.sync.happens_before import READ, Dependency, HappensBefore
from distmk.sync.interval_map import Group
from distmk.tasks import Task


@dataclass(frozen=True)
class Event:
    """A counter on `rank`, number `index` there. In every iteration the tasks `producers` add `count` to it.

    `spans_ranks`: some producers are on other ranks, so that a wait needs system scope on a GPU.
    """

    rank: int
    index: int
    producers: tuple[int, ...]
    count: int
    spans_ranks: bool = False


@dataclass
class Wiring:
    """The events of a graph, by task and by rank.

    waits: each task's (event, lag); lag 1 waits for the previous iteration.
    triggers: the events that each task signals.
    events: each rank's events.
    barriers: each rank's event of the iteration barrier; empty in a graph without a scheduler step.
    """

    waits: list[list[tuple[Event, int]]]
    triggers: list[list[Event]]
    events: list[list[Event]]
    barriers: list[Event] = field(default_factory=list)


_SORT_KEY = attrgetter("sort_key")
EventsOf = dict[tuple[int, tuple[int, ...]], list[Event]]  # by rank and producers
Intervals = list[tuple[AccessLog, int, int]]


def signals_per_iteration(task: Task, graph: Graph) -> int:
    """How often `task` signals each of its triggers in an iteration.

    A spread task signals once for each worker, a massive launch once for every instance and scheduler, and any other
    task once.
    """
    if task.launch is LaunchKind.SPREAD:
        return graph.num_workers
    return task.max_instances() * (graph.num_schedulers or 1) if task.launch is LaunchKind.MASSIVE else 1


def derive(graph: Graph) -> Wiring:
    """The wiring of `graph`.

    Raises UsageError if a worker's list is too long, or if a task overwrites data of another rank and no event of its
    own rank proves that the data has landed.
    """
    return _Derivation(graph).run()


class _Derivation:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_tasks = len(graph.tasks)
        self.num_signals = [signals_per_iteration(task, graph) for task in graph.tasks]
        writes = [list(task.writes()) for task in graph.tasks]
        self.order = HappensBefore(graph, [frozenset(region.rank for region in regions) for regions in writes])
        self.logs: dict[tuple[Buffer, int], AccessLog] = {}
        # A write implies the dependencies of a read of the same region.
        reads = [
            [r for r in task.reads() if r not in regions] for task, regions in zip(graph.tasks, writes, strict=True)
        ]
        self.reads = [self._intervals(regions) for regions in reads]
        owned = [set(task.owned_writes()) for task in graph.tasks]
        self.writes = [
            self._intervals(r for r in regions if r not in others)
            for regions, others in zip(writes, owned, strict=True)
        ]
        self.owned_writes = [self._intervals(regions) for regions in owned]
        self.dependencies: list[list[Dependency]] = []  # by task: dependencies that need a wait, in the last iteration

    def _intervals(self, regions: Iterable[Region]) -> Intervals:
        intervals = []
        for buffer, rank, begin, end in regions:
            log = self.logs.get((buffer, rank))
            if log is None:
                log = self.logs[(buffer, rank)] = AccessLog(rank, self.order)
            intervals.append((log, begin, end))
        return intervals

    def run(self) -> Wiring:
        for iteration in (0, 1):
            self.dependencies = []
            for index in range(self.num_tasks):
                node = index + iteration * self.num_tasks
                self.order.begin(node)
                self.dependencies.append(self._add_waits(node, self._conflicts(index, node)))
                self.order.finish(node)
        return self._wire()

    def _conflicts(self, index: int, node: int) -> list[Dependency]:
        """The dependencies of `node` on tasks with conflicting accesses. The node's own accesses are added to the logs."""
        dependencies: list[Dependency] = []
        order, task = self.order, self.graph.tasks[index]
        reader = Group([node], order.on_node(node, READ), shared=True)
        for log, begin, end in self.reads[index]:
            writers = log.read(begin, end, reader)
            if writers is not None and writers.nodes != order.barrier_nodes:
                dependencies.append(writers)
        if node >= self.num_tasks and task.launch not in (LaunchKind.AHEAD, LaunchKind.SCHEDULER):
            # No list keeps its signals of two iterations apart, and a count must not mix them.
            dependencies.append(order.on_node(node - self.num_tasks, task.rank))
        for log, begin, end in self.writes[index]:
            dependencies += log.write(begin, end, node)
        for log, begin, end in self.owned_writes[index]:
            dependencies += log.write_owned(begin, end, node)
        return dependencies

    def _add_waits(self, node: int, dependencies: list[Dependency]) -> list[Dependency]:
        """Add the dependencies that the clock of `node` does not imply yet, latest first, and return them."""
        kept: list[Dependency] = []
        dependencies.sort(key=_SORT_KEY, reverse=True)
        for dependency in dependencies:
            if self.order.after(node, dependency):
                continue
            dependency = self.order.unknown(node, dependency)
            if any(dependency.sort_key == other.sort_key and dependency.nodes == other.nodes for other in kept):
                continue
            kept.append(dependency)
            self.order.wait(node, dependency)
            if dependency.rank != self.graph.tasks[node % self.num_tasks].rank:
                self._check_known(node, dependency)
        return kept

    def _check_known(self, node: int, dependency: Dependency) -> None:
        """Raise UsageError unless the waits of `node` on its own rank prove that the dependency's data has landed."""
        if self.order.after(node, dependency):
            return
        tasks = self.graph.tasks
        task = tasks[node % self.num_tasks]
        names = ", ".join(sorted({tasks[n % self.num_tasks].op for n in dependency.nodes})[:3])
        raise UsageError(
            f"task {task.op} on rank {task.rank} overwrites what {names} left on "
            f"rank {dependency.rank}, of which no event of rank {task.rank} can tell; "
            f"have a task on rank {dependency.rank} read it in between"
        )

    def _wire(self) -> Wiring:
        wiring = Wiring(
            waits=[[] for _ in self.graph.tasks],
            triggers=[[] for _ in self.graph.tasks],
            events=[[] for _ in range(self.graph.num_ranks)],
        )
        made: EventsOf = {}
        if self.order.barrier is not None:
            for rank in range(self.graph.num_ranks):
                event = self._events(wiring, made, rank, (self.order.barrier,))[0]
                wiring.barriers.append(event)
        waits_for: dict[tuple[Dependency, int], list[tuple[Event, int]]] = {}
        for index, dependencies in enumerate(self.dependencies):
            rank, waits = self.graph.tasks[index].rank, wiring.waits[index]
            for dependency in dependencies:
                events = waits_for.get((dependency, rank))
                if events is None:
                    events = waits_for[(dependency, rank)] = self._waits_for(wiring, made, rank, dependency)
                waits += [wait for wait in events if wait not in waits]
        return wiring

    def _waits_for(self, wiring: Wiring, made: EventsOf, rank: int, dependency: Dependency) -> list[tuple[Event, int]]:
        """The waits, (event, lag), that put a task on `rank` after `dependency`."""
        this = tuple([node - self.num_tasks for node in dependency.nodes if node >= self.num_tasks])
        last = tuple([node for node in dependency.nodes if node < self.num_tasks])
        return [
            (event, lag)
            for lag, producers in ((0, this), (1, last))
            if producers
            for event in self._events(wiring, made, rank, producers)
        ]

    def _events(self, wiring: Wiring, made: EventsOf, rank: int, producers: tuple[int, ...]) -> list[Event]:
        """Events on `rank` that prove that `producers` are done: one for all if their sum cannot miscount, else one each."""
        key = (rank, producers)
        if key not in made:
            groups = [producers] if self._counts_safely(producers, rank) else [(producer,) for producer in producers]
            made[key] = []
            for group in groups:
                if (rank, group) in made and group != producers:
                    made[key] += made[(rank, group)]
                    continue
                count = sum([self.num_signals[p] for p in group])
                spans_ranks = any([self.order.rank_of[p] != rank for p in group])
                event = Event(rank, len(wiring.events[rank]), group, count, spans_ranks)
                wiring.events[rank].append(event)
                for producer in group:
                    wiring.triggers[producer].append(event)
                made[key].append(event)
        return made[key]

    def _counts_safely(self, producers: tuple[int, ...], rank: int) -> bool:
        """Whether a sum of counts stands for all producers: none may be able to signal an iteration ahead of another."""
        if len(producers) == 1:
            return True
        all_of_them = self.order.on_nodes(producers, rank)
        return all(self.order.signals_after(p + self.num_tasks, all_of_them) for p in producers)
