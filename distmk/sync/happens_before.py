"""The happens-before relation of a graph, built up in program order while waits are added to it.

A task that writes to several ranks pushes: it signals a peer's events with the data for that peer, before it is done
elsewhere. Two things prove that its data on rank r has landed: an event of rank r, or that the whole task is known to
be done. A third task that waited for the same push on another rank proves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from distmk.abi import LaunchKind
from distmk.graph.graph import Graph
from distmk.sync.vector_clock import VectorClock, VectorClocks
from distmk.tasks import SchedulerStep

READ = -1  # stands where a rank would be: a dependency on tasks that read, not on data
NO_RANKS: frozenset[int] = frozenset()

Acquired = tuple[VectorClock, list[int]]  # what a wait proves: a clock, and the nodes of which only the push is proved


class Dependency:
    """Nodes that must come first, at most one on each chain.

    nodes: in program order.
    rank: only their data on that rank matters; READ: only that they have read.
    chain, position: of the latest node. A clock covers the dependency if it includes `position` of `chain` and, with
      several nodes, all of `need`.
    pushes: the nodes whose data on `rank` must also have landed, which clocks do not show.
    unlisted: there are several nodes, and some of them are in no single worker's list.
    sort_key: in descending order the latest node comes first, then the smallest set, because a wait for it may imply
      the larger sets.
    acquired: by rank of the waiter, filled by `HappensBefore` if there are several nodes.
    """

    __slots__ = ("acquired", "chain", "latest", "need", "nodes", "position", "pushes", "rank", "sort_key", "unlisted")

    def __init__(
        self,
        nodes: tuple[int, ...],
        rank: int,
        pushes: tuple[int, ...],
        chain: int,
        position: int,
        need: VectorClock | None = None,
        unlisted: bool = False,
    ) -> None:
        self.nodes, self.rank, self.pushes = nodes, rank, pushes
        self.chain, self.position, self.need = chain, position, need
        self.latest, self.unlisted = nodes[-1], unlisted
        self.sort_key = (self.latest, rank, -len(nodes))
        self.acquired: dict[int, Acquired] = {}


class HappensBefore:
    """The clocks of a graph's nodes, and the waiters of each push.

    Nodes are processed in program order: `begin` a node, add its waits, `finish` it.
    """

    def __init__(self, graph: Graph, targets: list[frozenset[int]]) -> None:
        """`targets`: the ranks that each task writes to."""
        self.num_tasks = len(graph.tasks)
        self.rank_of = [task.rank for task in graph.tasks]
        # The peers whose events a task may signal before it is done, because it writes to other ranks too.
        self.pushed = [
            ranks - {rank} if len(ranks) > 1 else NO_RANKS for ranks, rank in zip(targets, self.rank_of, strict=True)
        ]
        placements = [(task.rank, task.worker if task.launch is LaunchKind.AHEAD else None) for task in graph.tasks]
        multi_rank = np.array([len(ranks) > 1 for ranks in targets], np.bool_)
        self.clocks = VectorClocks(placements, graph.num_workers, graph.num_ranks, multi_rank)
        # The task that signals the iteration barrier: every other task of an iteration comes after it.
        self.barrier = next((i for i, task in enumerate(graph.tasks) if isinstance(task, SchedulerStep)), None)
        self._may_idle = [task.may_idle for task in graph.tasks]
        self.barrier_nodes: tuple[int, ...] = ()  # that task in the iteration of the latest begun node
        self._table = self.clocks.table
        # Python lists and a memoryview give single elements several times faster than arrays do.
        self._chain, self._position = self.clocks.chain.tolist(), self.clocks.position.tolist()
        self._early = self.clocks.early.tolist()
        self._behind = memoryview(self._table)  # type: ignore[arg-type]
        self._num_lists = graph.num_ranks * graph.num_workers  # the first chains are the workers' lists
        self._last_on_chain = [-1] * self.clocks.num_chains
        self._push_waiters: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (pushing node, rank)

    def begin(self, node: int) -> None:
        """Start the clock of `node`: after the previous node of its chain, and after the iteration barrier."""
        clock = self._table[node]
        before = self._last_on_chain[self._chain[node]]
        if before >= 0:
            clock[:] = self._table[before]
        if self.barrier is not None:
            iteration, task = divmod(node, self.num_tasks)
            barrier = self.barrier + iteration * self.num_tasks
            self.barrier_nodes = (barrier,)
            if task != self.barrier and before < barrier:  # a node before it in this iteration has passed the barrier
                self._join(node, barrier)
        if self._may_idle[node % self.num_tasks]:
            self.clocks.settle_idle(node, clock)

    def may_idle(self, node: int) -> bool:
        """Whether `node` may signal before its waits are met."""
        return self._may_idle[node % self.num_tasks]

    def own_other_rows(self, nodes: Collection[int]) -> bool:
        """Whether all `nodes` belong to one iteration and to different ranks, so that they own different rows."""
        ranks = {self.rank_of[node % self.num_tasks] for node in nodes}
        return len(ranks) == len(nodes) and len({node // self.num_tasks for node in nodes}) == 1

    def finish(self, node: int) -> None:
        """Complete the clock of `node`, once all of its waits are added."""
        self._behind[node, self._chain[node]] = self._position[node]
        self._last_on_chain[self._chain[node]] = node

    def on_node(self, node: int, rank: int) -> Dependency:
        """The dependency on one node: on its data on `rank`, or on its reads (READ)."""
        pushes = (node,) if rank in self.pushed[node % self.num_tasks] else ()
        position = self._early[node] if pushes or rank == READ else self._position[node]
        return Dependency((node,), rank, pushes, self._chain[node], position)

    def on_nodes(self, nodes: Collection[int], rank: int) -> Dependency:
        """The dependency on all of `nodes`. The last node of each chain implies the others of that chain."""
        if len(nodes) == 1:
            return self.on_node(next(iter(nodes)), rank)
        last = {self._chain[node]: node for node in sorted(nodes)}
        kept = tuple(sorted(last.values()))
        if len(kept) == 1:
            return self.on_node(kept[0], rank)
        pushes = tuple(node for node in kept if rank in self.pushed[node % self.num_tasks])
        early = set(kept if rank == READ else pushes)
        need = np.zeros(self.clocks.num_chains, np.uint16)
        for node in kept:
            need[self._chain[node]] = self._early[node] if node in early else self._position[node]
        chain = self._chain[kept[-1]]
        return Dependency(kept, rank, pushes, chain, int(need[chain]), need, unlisted=max(last) >= self._num_lists)

    def unknown(self, node: int, dependency: Dependency) -> Dependency:
        """The part of `dependency` that the waits of `node` do not imply yet, if some tasks are in no single worker's list.

        Each such task is known by itself, and a wait for all of them would make every one of them signal another event.
        Dependencies on tasks in lists stay whole, because other tasks wait for the same set.
        """
        if not dependency.unlisted:
            return dependency
        known = {other for other in dependency.nodes if self.after(node, self.on_node(other, dependency.rank))}
        return self.on_nodes(set(dependency.nodes) - known, dependency.rank) if known else dependency

    def after(self, node: int, dependency: Dependency) -> bool:
        """Whether the waits of `node` so far order it after `dependency`."""
        if self._behind[node, dependency.chain] < dependency.position:
            return False
        if dependency.need is not None and not (self._table[node] >= dependency.need).all():
            return False
        return not dependency.pushes or self._landed(node, dependency)

    def signals_after(self, node: int, dependency: Dependency) -> bool:
        """Whether `node`, all of whose waits are added, signals after `dependency`.

        False for a push by a task that may idle.
        """
        idle = self.clocks.idle.get(node)
        if idle is None:
            return self.after(node, dependency)
        if dependency.pushes or idle[dependency.chain] < dependency.position:
            return False
        return dependency.need is None or bool((idle >= dependency.need).all())

    def _landed(self, node: int, dependency: Dependency) -> bool:
        """Whether the data of all pushes has landed before `node`: the push is done, or a task that happened before
        `node` waited for it on that rank.
        """
        rank, behind = dependency.rank, self._behind
        for push in dependency.pushes:
            if behind[node, self._chain[push]] >= self._position[push]:
                continue
            if push % self.num_tasks == self.barrier and rank == self.rank_of[node % self.num_tasks]:
                continue
            waiters = self._push_waiters.get((push, rank), ())
            if not any(behind[node, self._chain[waiter]] >= self._early[waiter] for waiter in waiters):
                return False
        return True

    def wait(self, node: int, dependency: Dependency) -> None:
        """Make `node` wait for the events of its rank that stand for `dependency`."""
        rank, clock = self.rank_of[node % self.num_tasks], self._table[node]
        if dependency.need is None:
            other = dependency.nodes[0]
            self._join(node, other)
            pushes = [other] if rank in self.pushed[other % self.num_tasks] else []
        else:
            acquired, pushes = self._acquired(dependency, rank)
            np.maximum(clock, acquired, out=clock)
        if not self._may_idle[node % self.num_tasks]:  # else the node proves nothing about its waits
            for push in pushes:
                self._push_waiters[(push, rank)].append(node)

    def _join(self, node: int, other: int) -> None:
        """Add to the clock of `node` what a wait on its rank for `other` proves."""
        chain, clock = self._chain[other], self._table[node]
        behind = self._behind[node, chain]
        np.maximum(clock, self.clocks.when_signaled(other), out=clock)
        if self.rank_of[node % self.num_tasks] in self.pushed[other % self.num_tasks]:  # only the push is proved
            self._behind[node, chain] = max(behind, self._early[other])

    def _acquired(self, dependency: Dependency, rank: int) -> Acquired:
        """What a wait on `rank` for several nodes proves."""
        known = dependency.acquired.get(rank)
        if known is None:
            early = [node for node in dependency.nodes if rank in self.pushed[node % self.num_tasks]]
            done = sorted(set(dependency.nodes) - set(early))
            known = dependency.acquired[rank] = self.clocks.join(done, early), early
        return known
