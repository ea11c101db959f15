"""What happens before what, and whether counts can stand for their tasks.

Two iterations are enough. Events lead from an iteration to itself or the next, so what orders two tasks of the same or
of adjacent iterations lies within these. Of tasks two iterations apart, the one that writes also wrote in between, and
is ordered after the one and before the other.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from distmk.check.findings import Findings
from distmk.check.memory import Memory
from distmk.check.view import View
from distmk.check.waits import Signals
from distmk.sync.vector_clock import Clock, Clocks

READERS = -1  # in place of the rank where something was written
NOWHERE: frozenset[int] = frozenset()
MAX_TABLE_BYTES = 2**31


class Need:
    """What must be behind a clock: tasks, as far as they read, or as far as they wrote to a rank (or to any: `whole`).

    `pushes` lists (task node, rank) whose arrival a clock alone does not tell.
    """

    __slots__ = ("clock", "nodes", "pushes")

    def __init__(self, nodes: tuple[int, ...], clock: Clock, pushes: list[tuple[int, int]]) -> None:
        self.nodes, self.clock, self.pushes = nodes, clock, pushes


class Order:
    """The clocks of two iterations of a program."""

    def __init__(
        self, view: View, signals: Signals, memory: Memory, order: list[int], targets: list[frozenset[int]]
    ) -> None:
        self.view, self.signals, self.memory, self.targets = view, signals, memory, targets
        spread = np.array([len(ranks) > 1 for ranks in targets], np.bool_)
        places = zip(view.task_rank.tolist(), view.worker.tolist(), strict=True)
        placements = [(rank, worker if worker >= 0 else None) for rank, worker in places]
        self.clocks = Clocks(placements, view.num_workers, view.num_ranks, spread)
        self.order = order
        self.rank_of = view.task_rank.tolist()
        # A task that writes to several ranks may be heard of by those it pushes to before it is done.
        self.pushed = [
            ranks - {rank} if len(ranks) > 1 else NOWHERE for ranks, rank in zip(targets, self.rank_of, strict=True)
        ]
        self.chain, self.early = self.clocks.chain.tolist(), self.clocks.early.tolist()
        self.position = self.clocks.position.tolist()
        self.num_pairs = 0
        self._heard: dict[tuple[int, int], Clock] = {}
        self._needs: dict[tuple[tuple[int, ...], int], Need] = {}
        self._waiting: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._events_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (task, rank)
        for event, producers in signals.producers.items():
            for task in producers:
                self._events_of[(task, int(view.event_rank[event]))].append(event)
        self._run()

    def _run(self) -> None:
        last: dict[int, int] = {}  # of each chain
        clocks, num_tasks, gates = self.clocks, self.view.num_tasks, self.signals.gates
        chain = self.chain
        for iteration in (0, 1):
            for task in self.order:
                node = task + iteration * num_tasks
                before = last.get(chain[node])
                clock = clocks.table[node]
                if before is not None:
                    clock[:] = clocks.table[before]
                if gates and task != self.signals.opener:
                    np.maximum(clock, self.hears(gates[self.rank_of[task]], iteration), out=clock)
                for event, lag in self.signals.waits[task]:
                    if lag <= iteration:
                        np.maximum(clock, self.hears(event, iteration - lag), out=clock)
                clocks.settle(node, clock)
                last[chain[node]] = node

    def hears(self, event: int, iteration: int) -> Clock:
        """What a wait for `event` tells."""
        heard = self._heard.get((event, iteration))
        if heard is None:
            rank, first = int(self.view.event_rank[event]), iteration * self.view.num_tasks
            producers = self.signals.producers[event]
            early = [task + first for task in producers if rank in self.pushed[task]]
            done = [task + first for task in producers if rank not in self.pushed[task]]
            heard = self._heard[(event, iteration)] = self.clocks.join(done, early)
        return heard

    def need(self, nodes: tuple[int, ...], place: int) -> Need:
        """That of `nodes` have read (READERS) or have written to rank `place`."""
        known = self._needs.get((nodes, place))
        if known is None:
            if place == READERS:
                known = Need(nodes, self.clocks.before_all((), nodes), [])
            else:
                early = [node for node in nodes if place in self.pushed[node % self.view.num_tasks]]
                done = [node for node in nodes if node not in early] if early else nodes
                known = Need(nodes, self.clocks.before_all(done, early), [(node, place) for node in early])
            self._needs[(nodes, place)] = known
        return known

    def need_of_event(self, event: int) -> Need:
        """What a wait for `event` in iteration 0 stands for."""
        rank = int(self.view.event_rank[event])
        nodes = self.signals.producers[event]
        done, pushes = [], []
        for task in nodes:
            if rank in self.pushed[task]:
                pushes.append((task, rank))
            elif self.pushed[task]:
                pushes += [(task, target) for target in sorted(self.targets[task])]
            else:
                done.append(task)
        return Need(nodes, self.clocks.before_all(done, [task for task, _ in pushes]), pushes)

    def after(self, node: int, need: Need, clock: Clock | None = None) -> bool:
        """Whether `node` starts with all of `need` behind it; or, given a `clock` of before, had it behind it then."""
        clock = self.clocks.table[node] if clock is None else clock
        if not (clock >= need.clock).all():
            return False
        return all(self._arrived(node, clock, pusher, rank) for pusher, rank in need.pushes)

    def after_one(self, node: int, other: int, place: int, clock: Clock | None = None) -> bool:
        """`after` of the need of one task."""
        chain = self.chain[other]
        behind = int(self.clocks.table[node, chain] if clock is None else clock[chain])
        if behind >= self.position[other]:
            return True
        if behind < self.early[other]:
            return False
        if place == READERS:
            return True
        if place not in self.pushed[other % self.view.num_tasks]:
            return False
        return self._arrived(node, self.clocks.table[node] if clock is None else clock, other, place)

    def _arrived(self, node: int, clock: Clock, pusher: int, rank: int) -> bool:
        """Whether what `pusher` wrote to `rank` was there before `node`: it is done, or somebody waited there."""
        if self.clocks.happened(pusher, clock):
            return True
        iteration, task = divmod(pusher, self.view.num_tasks)
        for event in self._events_of[(task, rank)]:
            if self._gate_of(event, node, iteration):
                return True
            waiting = self._waiters(event, iteration)
            if (clock[self.clocks.chain[waiting]] >= self.clocks.early[waiting]).any():
                return True
        return False

    def _gate_of(self, event: int, node: int, iteration: int) -> bool:
        """Whether `event` is the gate that `node` came through: a quick answer to the commonest question."""
        rank = self.rank_of[node % self.view.num_tasks]
        gates = self.signals.gates
        return bool(gates) and gates[rank] == event and node // self.view.num_tasks == iteration

    def _waiters(self, event: int, iteration: int) -> npt.NDArray[np.int64]:
        """Nodes that start only once `event` has counted up in `iteration`."""
        found = self._waiting.get((event, iteration))
        if found is None:
            view = self.view
            nodes = [
                task + (iteration + lag) * view.num_tasks
                for task, lag in self.signals.waiters.get(event, ())
                if iteration + lag <= 1
            ]
            if event in self.signals.gates:
                rank = int(view.event_rank[event])
                gated = range(int(view.first_task[rank]), int(view.first_task[rank + 1]))
                nodes += [task + iteration * view.num_tasks for task in gated if task != self.signals.opener]
            found = self._waiting[(event, iteration)] = np.array(nodes, np.int64)
        return found

    def name(self, node: int) -> str:
        """A task and its iteration."""
        iteration, task = divmod(node, self.view.num_tasks)
        return f"{self.view.task_name(task)} in {'the next' if iteration else 'an'} iteration"


def check_counting(order: Order, findings: Findings) -> None:
    """No producer of an awaited event fires for the next iteration before all have fired for this one."""
    view = order.view
    awaited = sorted({*order.signals.waiters, *order.signals.gates})
    for event in awaited:
        producers = order.signals.producers.get(event, ())
        if len(producers) < 2 and all(view.worker[task] >= 0 for task in producers):
            continue  # a queue runs its task once an iteration
        need = order.need_of_event(event)
        rows = np.array(producers, np.int64) + view.num_tasks
        if not need.pushes and np.all(order.clocks.table[rows] >= need.clock):
            continue
        for task in producers:
            if order.after(task + view.num_tasks, need):
                continue
            ahead = order.clocks.table[task + view.num_tasks]
            slow = next((p for p in producers if not order.clocks.happened(p, ahead)), producers[0])
            text = f"may fire {view.event_name(event)} for the next iteration before {view.task_name(slow)}"
            findings.add("counting", f"{view.task_name(task)} {text} has for this one")
            break
        if findings.full:
            return
