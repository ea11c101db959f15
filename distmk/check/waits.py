"""Whether every wait can be met: counts add up, gates open, and nothing waits in a circle."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from distmk.abi import NO_EVENT, LaunchKind
from distmk.check.findings import Findings
from distmk.check.view import Ints, View

MAX_NAMED = 6  # tasks of a cycle that are spelled out


class Signals:
    """Who triggers and who awaits each event. `gates[rank]` is the event that starts the rank's iteration, if any."""

    def __init__(self, view: View, findings: Findings) -> None:
        self.view = view
        self.totals = [0] * view.num_events
        producers: dict[int, dict[int, None]] = defaultdict(dict)
        triggers = zip(
            view.trigger_task.tolist(), view.trigger_event.tolist(), view.trigger_amount.tolist(), strict=True
        )
        for task, event, amount in triggers:
            if amount:
                self.totals[event] += amount * view.firings(task)
                producers[event][task] = None
        self.producers = {event: tuple(sorted(tasks)) for event, tasks in producers.items()}
        self.waits: list[list[tuple[int, int]]] = [[] for _ in range(view.num_tasks)]  # (event, lag) of each task
        self.waiters: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (task, lag) of each event
        for task, event, lag in zip(
            view.wait_task.tolist(), view.wait_event.tolist(), view.wait_lag.tolist(), strict=True
        ):
            self.waits[task].append((event, lag))
            self.waiters[event].append((task, lag))
        self.opener = next((int(t) for t in np.flatnonzero(view.launch == LaunchKind.SCHEDULER)), None)
        self.gates: list[int] = []
        self._check_counts(findings)
        self._check_gates(findings)

    def _check_counts(self, findings: Findings) -> None:
        view = self.view
        totals = np.array([min(total, 2**62) for total in self.totals] or [0], np.int64)
        wrong = (view.wait_count != totals[view.wait_event]) if view.num_events else np.zeros(0, np.bool_)
        for i in np.flatnonzero(wrong | (view.wait_count < 1)):
            event = int(view.wait_event[i])
            given = f"is triggered {self.totals[event]} times an iteration" if self.totals[event] else "nobody triggers"
            name, count = view.task_name(int(view.wait_task[i])), view.wait_count[i]
            findings.add("threshold", f"{name} waits for {count} of {view.event_name(event)}, which {given}")
        for i in np.flatnonzero(view.wait_lag > 1):
            name = view.task_name(int(view.wait_task[i]))
            text = f"waits with lag {view.wait_lag[i]} for {view.event_name(int(view.wait_event[i]))}, expected 0 or 1"
            findings.add("lag", f"{name} {text}")

    def _check_gates(self, findings: Findings) -> None:
        view = self.view
        for rank, part in enumerate(view.parts):
            index = part.header.iteration_event
            if (index == NO_EVENT) != (self.opener is None):
                found = "no gate" if index == NO_EVENT else "a gate"
                runs = "no task" if self.opener is None else view.task_name(self.opener)
                findings.add(
                    "iteration barrier", f"rank {rank} has {found}, but {runs} is run by a scheduler to open it"
                )
            if index == NO_EVENT or self.opener is None:
                continue
            if index >= part.header.num_events:
                findings.add("iteration barrier", f"rank {rank}: event {index} is not there")
                continue
            event = int(view.first_event[rank]) + index
            self.gates.append(event)
            if self.totals[event] != 1 or self.producers.get(event) != (self.opener,):
                by = ", ".join(view.task_name(task) for task in self.producers.get(event, ())[:MAX_NAMED]) or "nobody"
                text = f"{view.event_name(event)} counts {self.totals[event]} by {by}"
                findings.add("iteration barrier", f"{text}; expected 1 by {view.task_name(self.opener)}")


class StartOrder:
    """What must have happened before a task can start in an iteration: the graph of tasks, events and launch points.

    A worker that comes to its copy of a spread task waits there until the task may start; the task is done with the last
    of its copies. So there are nodes for its start and for every copy, and the task itself is its end.
    """

    def __init__(self, view: View, signals: Signals) -> None:
        self.view = view
        self.signals = signals
        self.before: list[Ints] = []
        self.after: list[Ints] = []
        num_launches = sum(len(launches) for launches in view.launches)
        spread = np.flatnonzero(view.spread)
        self.first_launch = view.num_tasks + view.num_events
        self.first_start = self.first_launch + num_launches
        self.num_nodes = self.first_start + len(spread)  # and a node for every copy
        self.start: Ints = np.arange(view.num_tasks)
        self.start[spread] = np.arange(self.first_start, self.num_nodes)
        self.spread: list[tuple[int, int]] = [(task, -1) for task in spread.tolist()]  # and worker, of these nodes
        self._add_events()
        self._add_queues()
        self._add_gates()
        self._add_launches()

    def order(self, findings: Findings) -> list[int]:
        """The tasks in an order in which they can run; names a cycle if there is none."""
        before, after = np.concatenate(self.before), np.concatenate(self.after)
        by_source = np.argsort(before, kind="stable")
        targets = after[by_source].tolist()
        starts = np.searchsorted(before[by_source], np.arange(self.num_nodes + 1)).tolist()
        missing = np.bincount(after, minlength=self.num_nodes).tolist()
        ready = deque(node for node, count in enumerate(missing) if count == 0)
        found = []
        while ready:
            node = ready.popleft()
            found.append(node)
            for target in targets[starts[node] : starts[node + 1]]:
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
        if len(found) < self.num_nodes:
            findings.add("cycle", self._cycle(before, after, {n for n, count in enumerate(missing) if count}))
        return [node for node in found if node < self.view.num_tasks]

    def _add(self, before: Ints, after: Ints) -> None:
        self.before.append(np.asarray(before, np.int64))
        self.after.append(np.asarray(after, np.int64))

    def _add_events(self) -> None:
        view = self.view
        counts = view.trigger_amount > 0
        self._add(view.trigger_task[counts], view.num_tasks + view.trigger_event[counts])
        same = view.wait_lag == 0
        self._add(view.num_tasks + view.wait_event[same], self.start[view.wait_task[same]])

    def _add_queues(self) -> None:
        view = self.view
        for place, queue in enumerate(view.queues):
            nodes, at = queue.copy(), np.flatnonzero(view.spread[queue])
            tasks = queue[at]
            copies = nodes[at] = np.arange(self.num_nodes, self.num_nodes + len(at))
            self.num_nodes += len(at)
            self.spread += [(task, place % view.num_workers) for task in tasks.tolist()]
            self._add(nodes[:-1], nodes[1:])
            self._add(self.start[tasks], copies)
            self._add(copies, tasks)

    def _add_gates(self) -> None:
        view = self.view
        for event in self.signals.gates:
            rank = int(view.event_rank[event])
            gated = np.arange(view.first_task[rank], view.first_task[rank + 1])
            gated = gated[gated != self.signals.opener]
            self._add(np.full(len(gated), view.num_tasks + event), self.start[gated])

    def _add_launches(self) -> None:
        """A scheduler walks its list in order: a launch point is its being handed out, which waits for no task to end.

        A single task concerns the scheduler whose turn it is, a massive one all of them.
        """
        view, point = self.view, self.first_launch
        before: list[int] = []
        after: list[int] = []

        def edge(source: int, target: int) -> None:
            before.append(source)
            after.append(target)

        for rank, launches in enumerate(view.launches):
            at: dict[int, int] = {}  # where each scheduler is since the last massive launch
            all_at: int | None = None
            gate = view.num_tasks + self.signals.gates[rank] if self.signals.gates else None
            gated = False
            for turn, task in enumerate(launches):
                kind = int(view.launch[task])
                who = 0 if kind == LaunchKind.SCHEDULER else turn % view.num_schedulers
                if kind == LaunchKind.MASSIVE:
                    previous = [*at.values(), *([] if all_at is None else [all_at])]
                    at, all_at = {}, point
                else:
                    previous = [last for last in (at.get(who, all_at),) if last is not None]
                    at[who] = point
                for last in previous:
                    edge(last, point)
                gated = gated or kind != LaunchKind.SCHEDULER  # a scheduler comes past such a task only with the gate
                if gated and gate is not None:
                    edge(gate, point)
                for event, lag in self.signals.waits[task]:
                    if lag == 0:
                        edge(view.num_tasks + event, point)
                edge(point, task)
                point += 1
        self._add(np.array(before, np.int64), np.array(after, np.int64))

    def _cycle(self, before: Ints, after: Ints, stuck: set[int]) -> str:
        edges = zip(before.tolist(), after.tolist(), strict=True)
        cause = {target: source for source, target in edges if source in stuck}
        node = min(stuck)
        seen: dict[int, int] = {}
        while node not in seen:  # backwards, from each stuck node to one that it waits for
            seen[node] = len(seen)
            node = cause[node]
        ring = [n for n, place in sorted(seen.items(), key=lambda item: -item[1]) if place >= seen[node]]
        return " -> ".join(self._name(n) for n in [*ring[: 4 * MAX_NAMED], ring[0]])

    def _name(self, node: int) -> str:
        view = self.view
        if node < view.num_tasks:
            return view.task_name(node)
        if node < self.first_launch:
            return view.event_name(node - view.num_tasks)
        if node >= self.first_start:
            return view.task_name(*self.spread[node - self.first_start])
        launched = [task for launches in view.launches for task in launches]
        return f"hand out {view.task_name(launched[node - self.first_launch])}"
