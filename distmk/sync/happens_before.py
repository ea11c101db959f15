"""What each task may rely on: sets of tasks that it must come after, and whether something tells it that they are done.

A push fires the events of its rank with its data, before the task is done elsewhere. So what a task that writes to
several ranks left on a rank is known there by an event of that rank only (or once the whole task is known to be done):
it is not enough to know some third task that came after another of its pushes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from distmk.abi import LaunchKind
from distmk.graph.graph import Graph
from distmk.sync.vector_clock import Clock, Clocks
from distmk.tasks import SchedulerStep

NO_PLACE = -1  # of a dependency on readers
NOWHERE: frozenset[int] = frozenset()

Told = tuple[Clock, list[int]]  # what a wait tells, and the nodes of which it tells no more than their push


class Dependency:
    """Nodes that must be done first, at most one a chain; `latest` is the last of them in program order.

    Of what they wrote, only what they left on rank `place` matters; of readers (NO_PLACE), only that they have read. A
    clock says so if it has `position` of `chain` behind it, which is the latest node, and all of `need` if there are
    several. The `pushes` among the nodes must have arrived besides, which no clock tells.
    """

    __slots__ = ("age", "chain", "latest", "need", "nodes", "place", "position", "pushes", "told")

    def __init__(
        self,
        nodes: tuple[int, ...],
        place: int,
        pushes: tuple[int, ...],
        chain: int,
        position: int,
        need: Clock | None = None,
    ) -> None:
        self.nodes, self.place, self.pushes = nodes, place, pushes
        self.chain, self.position, self.need = chain, position, need
        self.latest = nodes[-1]
        self.age = (self.latest, place, -len(nodes))  # a small set first: who waited for it may know of the others
        self.told: dict[int, Told] = {}  # by rank, if there are several nodes


class History:
    """The clocks of a graph's tasks in two iterations, filled in program order, and who waited for which push."""

    def __init__(self, graph: Graph, targets: list[frozenset[int]]) -> None:
        """`targets`: the ranks that each task writes to."""
        self.num_tasks = len(graph.tasks)
        self.rank_of = [task.rank for task in graph.tasks]
        # Ranks whose events may hear of a task before it is done, because it pushes to them and writes elsewhere too.
        self.pushed = [to - {rank} if len(to) > 1 else NOWHERE for to, rank in zip(targets, self.rank_of, strict=True)]
        placements = [(task.rank, task.worker if task.launch is LaunchKind.AHEAD else None) for task in graph.tasks]
        spread = np.array([len(to) > 1 for to in targets], np.bool_)
        self.clocks = Clocks(placements, graph.num_workers, graph.num_ranks, spread)
        self.gate = next((i for i, task in enumerate(graph.tasks) if isinstance(task, SchedulerStep)), None)
        self._table = self.clocks.table
        self.gate_alone: tuple[int, ...] = ()  # the gate's node in the iteration that is being entered
        # Single elements are read far quicker from lists and a memoryview than from arrays.
        self._chain, self._position = self.clocks.chain.tolist(), self.clocks.position.tolist()
        self._early = self.clocks.early.tolist()
        self._behind = memoryview(self._table)  # type: ignore[arg-type]
        self._last_on_chain = [-1] * self.clocks.num_chains
        self._arrivals: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (node, rank): who waited for its push

    def enter(self, node: int) -> None:
        """Start the clock of `node` with what its queue and the gate tell."""
        row = self._table[node]
        before = self._last_on_chain[self._chain[node]]
        if before >= 0:
            row[:] = self._table[before]
        if self.gate is not None:
            iteration, task = divmod(node, self.num_tasks)
            gate = self.gate + iteration * self.num_tasks
            self.gate_alone = (gate,)
            if task != self.gate and before < gate:  # a predecessor in this iteration came through the gate as well
                self._listen(node, gate)

    def settle(self, node: int) -> None:
        """Nothing more is waited for: `node` has its clock."""
        self._behind[node, self._chain[node]] = self._position[node]
        self._last_on_chain[self._chain[node]] = node

    def single(self, node: int, place: int) -> Dependency:
        """The dependency on one node."""
        pushes = (node,) if place in self.pushed[node % self.num_tasks] else ()
        position = self._early[node] if pushes or place == NO_PLACE else self._position[node]
        return Dependency((node,), place, pushes, self._chain[node], position)

    def dependency(self, nodes: Collection[int], place: int) -> Dependency:
        """The dependency on all of `nodes`."""
        if len(nodes) == 1:
            return self.single(next(iter(nodes)), place)
        last = {self._chain[node]: node for node in sorted(nodes)}  # of several on one chain the last speaks for all
        speakers = tuple(sorted(last.values()))
        if len(speakers) == 1:
            return self.single(speakers[0], place)
        pushes = tuple(node for node in speakers if place in self.pushed[node % self.num_tasks])
        early = set(speakers if place == NO_PLACE else pushes)
        need = np.zeros(self.clocks.num_chains, np.uint16)
        for node in speakers:
            need[self._chain[node]] = self._early[node] if node in early else self._position[node]
        chain = self._chain[speakers[-1]]
        return Dependency(speakers, place, pushes, chain, int(need[chain]), need)

    def knows(self, node: int, dependency: Dependency) -> bool:
        """Whether the clock of `node` says that it comes after `dependency`."""
        if self._behind[node, dependency.chain] < dependency.position:
            return False
        if dependency.need is not None and not (self._table[node] >= dependency.need).all():
            return False
        return not dependency.pushes or self._arrived(node, dependency)

    def _arrived(self, node: int, dependency: Dependency) -> bool:
        place, behind = dependency.place, self._behind
        for push in dependency.pushes:
            if behind[node, self._chain[push]] >= self._position[push]:
                continue
            if push % self.num_tasks == self.gate and place == self.rank_of[node % self.num_tasks]:
                continue
            waiters = self._arrivals.get((push, place), ())
            if not any(behind[node, self._chain[waiter]] >= self._early[waiter] for waiter in waiters):
                return False
        return True

    def wait(self, node: int, dependency: Dependency) -> None:
        """Let `node` wait for events of its rank that stand for `dependency`."""
        rank, row = self.rank_of[node % self.num_tasks], self._table[node]
        if dependency.need is None:
            other = dependency.nodes[0]
            self._listen(node, other)
            if rank in self.pushed[other % self.num_tasks]:
                self._arrivals[(other, rank)].append(node)
            return
        clock, pushes = self._told(dependency, rank)
        np.maximum(row, clock, out=row)
        for push in pushes:
            self._arrivals[(push, rank)].append(node)

    def _listen(self, node: int, other: int) -> None:
        """Add to the clock of `node` what a wait on its rank for `other` tells."""
        chain, row = self._chain[other], self._table[node]
        behind = self._behind[node, chain]
        np.maximum(row, self._table[other], out=row)
        if self.rank_of[node % self.num_tasks] in self.pushed[other % self.num_tasks]:  # no more than its push
            self._behind[node, chain] = max(behind, self._early[other])

    def _told(self, dependency: Dependency, rank: int) -> Told:
        """What a wait on `rank` for several nodes tells, and of which of them it tells no more than their push."""
        told = dependency.told.get(rank)
        if told is None:
            early = [node for node in dependency.nodes if rank in self.pushed[node % self.num_tasks]]
            done = sorted(set(dependency.nodes) - set(early))
            told = dependency.told[rank] = self.clocks.join(done, early), early
        return told
