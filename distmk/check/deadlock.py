"""No tasks wait in a circle: the tasks, events and dispatches of an iteration can happen in some order."""

from __future__ import annotations

from collections import deque

import numpy as np

from distmk.abi import LaunchKind
from distmk.check.findings import Findings
from distmk.check.thresholds import MAX_NAMED, Signals
from distmk.program.reader import Ints, ProgramTables


class StartGraph:
    """A graph of what must happen before what in one iteration.

    Nodes, in this order: the end of every task; every event; the dispatch of every task that schedulers launch; the
    start of every spread task; the copies of spread tasks in workers' queues. A worker waits at its copy of a spread
    task until the task may start, and the task ends with its last copy. Any other task has one node for its start and
    its end.
    """

    def __init__(self, tables: ProgramTables, signals: Signals) -> None:
        self.tables = tables
        self.signals = signals
        self.sources: list[Ints] = []
        self.targets: list[Ints] = []
        spread = np.flatnonzero(tables.tasks.spread)
        self.first_dispatch = tables.num_tasks + tables.num_events
        self.first_start = self.first_dispatch + sum(map(len, tables.launches))
        self.num_nodes = self.first_start + len(spread)  # plus the copies, added below
        self.start: Ints = np.arange(tables.num_tasks)  # the node at which each task starts
        self.start[spread] = np.arange(self.first_start, self.num_nodes)
        self.spread_nodes: list[tuple[int, int]] = [(task, -1) for task in spread.tolist()]  # task and worker
        self._add_events()
        self._add_queues()
        self._add_barriers()
        self._add_dispatches()

    def order(self, findings: Findings) -> list[int]:
        """The tasks in an order in which they can run (topological sort). If no order exists, a finding names a cycle."""
        sources, targets = np.concatenate(self.sources), np.concatenate(self.targets)
        by_source = np.argsort(sources, kind="stable")
        following = targets[by_source].tolist()
        begins = np.searchsorted(sources[by_source], np.arange(self.num_nodes + 1)).tolist()
        num_missing = np.bincount(targets, minlength=self.num_nodes).tolist()
        ready = deque(node for node, count in enumerate(num_missing) if count == 0)
        ordered = []
        while ready:
            node = ready.popleft()
            ordered.append(node)
            for target in following[begins[node] : begins[node + 1]]:
                num_missing[target] -= 1
                if not num_missing[target]:
                    ready.append(target)
        if len(ordered) < self.num_nodes:
            stuck = {node for node, count in enumerate(num_missing) if count}
            findings.add("cycle", self._cycle(sources, targets, stuck))
        return [node for node in ordered if node < self.tables.num_tasks]

    def _add(self, sources: Ints, targets: Ints) -> None:
        self.sources.append(np.asarray(sources, np.int64))
        self.targets.append(np.asarray(targets, np.int64))

    def _add_events(self) -> None:
        """Edges from producers to their event, and from the event to its waiters of the same iteration."""
        first_event, triggers, waits = self.tables.num_tasks, self.tables.triggers, self.tables.waits
        counts = triggers.amount > 0
        self._add(triggers.task[counts], first_event + triggers.event[counts])
        same = waits.lag == 0
        self._add(first_event + waits.event[same], self.start[waits.task[same]])

    def _add_queues(self) -> None:
        """Every worker runs its queue in order."""
        tables = self.tables
        for index, queue in enumerate(tables.queues):
            nodes, spread = queue.copy(), np.flatnonzero(tables.tasks.spread[queue])
            tasks = queue[spread]
            copies = nodes[spread] = np.arange(self.num_nodes, self.num_nodes + len(spread))
            self.num_nodes += len(spread)
            self.spread_nodes += [(task, index % tables.num_workers) for task in tasks.tolist()]
            self._add(nodes[:-1], nodes[1:])
            self._add(self.start[tasks], copies)
            self._add(copies, tasks)

    def _add_barriers(self) -> None:
        """Edges from a rank's iteration barrier to all of its tasks except the scheduler step."""
        tables = self.tables
        for event in self.signals.barriers:
            rank = int(tables.event_rank[event])
            behind = np.arange(tables.first_task[rank], tables.first_task[rank + 1])
            behind = behind[behind != self.signals.scheduler_step]
            self._add(np.full(len(behind), tables.num_tasks + event), self.start[behind])

    def _add_dispatches(self) -> None:
        first = self.first_dispatch
        edges: list[tuple[int, int]] = []
        for rank, launches in enumerate(self.tables.launches):
            edges += self._dispatch_edges(rank, launches, first)
            first += len(launches)
        sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
        self._add(sources, targets)

    def _dispatch_edges(self, rank: int, launches: list[int], first: int) -> list[tuple[int, int]]:
        """Edges (source, target) of a rank's launch list; the dispatch of launches[i] is node first + i.

        Schedulers go through the list in order. At a task they wait for its events, but never for another task to end.
        A single task is dispatched by one scheduler, in round-robin order; a massive task is dispatched by all of them.
        """
        tables, signals = self.tables, self.signals
        edges: list[tuple[int, int]] = []
        last: dict[int, int] = {}  # by scheduler: its last dispatch since the last massive one
        last_massive: int | None = None
        barrier = tables.num_tasks + signals.barriers[rank] if signals.barriers else None
        behind_barrier = False
        for index, task in enumerate(launches):
            node, kind = first + index, int(tables.tasks.launch[task])
            scheduler = 0 if kind == LaunchKind.SCHEDULER else index % tables.num_schedulers
            if kind == LaunchKind.MASSIVE:
                previous = [*last.values(), *([] if last_massive is None else [last_massive])]
                last, last_massive = {}, node
            else:
                previous = [each for each in (last.get(scheduler, last_massive),) if each is not None]
                last[scheduler] = node
            edges += [(each, node) for each in previous]
            # A scheduler passes the iteration barrier before it goes on to any task other than the scheduler step.
            behind_barrier = behind_barrier or kind != LaunchKind.SCHEDULER
            if behind_barrier and barrier is not None:
                edges.append((barrier, node))
            edges += [(tables.num_tasks + event, node) for event, lag in signals.waits[task] if lag == 0]
            edges.append((node, task))
        return edges

    def _cycle(self, sources: Ints, targets: Ints, stuck: set[int]) -> str:
        """The text of a cycle among the nodes that never become ready."""
        edges = zip(sources.tolist(), targets.tolist(), strict=True)
        cause = {target: source for source, target in edges if source in stuck}
        node = min(stuck)
        seen: dict[int, int] = {}
        while node not in seen:  # follow each stuck node to a node that it waits for
            seen[node] = len(seen)
            node = cause[node]
        cycle = [n for n, step in sorted(seen.items(), key=lambda item: -item[1]) if step >= seen[node]]
        return " -> ".join(self._describe(n) for n in [*cycle[: 4 * MAX_NAMED], cycle[0]])

    def _describe(self, node: int) -> str:
        tables = self.tables
        if node < tables.num_tasks:
            return tables.describe_task(node)
        if node < self.first_dispatch:
            return tables.describe_event(node - tables.num_tasks)
        if node >= self.first_start:
            return tables.describe_task(*self.spread_nodes[node - self.first_start])
        launched = [task for launches in tables.launches for task in launches]
        return f"dispatch {tables.describe_task(launched[node - self.first_dispatch])}"
