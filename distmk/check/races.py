"""Whether every two conflicting accesses are ordered.

Two iterations are enough, as for `order`. A task waits before it touches anything, unless it looks early: then it may
write as soon as its worker turns to it (`starts`), and all that it overwrites must be over by then.
"""

from __future__ import annotations

from collections import defaultdict

from distmk.check.findings import Findings
from distmk.check.memory import Span
from distmk.check.order import READERS, Order
from distmk.check.starts import Starts
from distmk.sync.interval_map import Group, IntervalLog
from distmk.sync.vector_clock import Clock

NOWHERE: frozenset[tuple[int, int, int]] = frozenset()


def _nodes(group: Group) -> tuple[int, ...]:
    """The nodes of a group as a tuple, the same object until they change."""
    if group.note is None:
        group.note = tuple(group.nodes)
    nodes: tuple[int, ...] = group.note
    return nodes


def _told_apart(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Without reads of what the task also writes: a write must be ordered against all that a read must be. But not
    without looks, which are over sooner or later than what is written there.
    """
    written = {span[1:4] for span in spans if span.write}
    return tuple([span for span in spans if span.write or span.early or span[1:4] not in written])


class Races:
    """Goes through the accesses in an order in which they can happen, and looks for any that need not happen so."""

    def __init__(self, order: Order, starts: Starts, touched: list[tuple[Span, ...]], findings: Findings) -> None:
        self.order, self.starts, self.findings = order, starts, findings
        self.touched = [_told_apart(spans) for spans in touched]
        self.readers: dict[int, IntervalLog] = defaultdict(IntervalLog)
        self.writers: dict[int, IntervalLog] = defaultdict(IntervalLog)
        self._unions: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def run(self) -> None:
        """Checks the second iteration against itself and the first; the first against itself would say the same."""
        num_tasks = self.order.view.num_tasks
        for task in self.order.order:
            self._record(task, self.touched[task])
        for task in self.order.order:
            if self.findings.full:
                return
            self._check(task + num_tasks, self.touched[task])
            self._record(task + num_tasks, self.touched[task])

    def _record(self, node: int, spans: tuple[Span, ...]) -> None:
        for write, place, begin, end, _, _ in spans:
            if write:
                self.readers[place].cut(begin, end)
                self.writers[place].cut(begin, end)
                self.writers[place].add(begin, end, Group([node]))
        for write, place, begin, end, _, _ in spans:
            if not write:
                self.readers[place].add(begin, end, Group([node]))

    def _check(self, node: int, spans: tuple[Span, ...]) -> None:
        num_ranks, task = self.order.view.num_ranks, node % self.order.view.num_tasks
        looks = self.starts.looks.get(task, NOWHERE)
        start = self.starts.acting(task) if looks and self.starts.queued[task] else None
        for span in spans:
            if span.write:
                # It clears what it has seen, so that was written before.
                clock = None if span.clears and span[1:4] in looks else start
                for log, kind, by in ((self.readers, READERS, start), (self.writers, span.place % num_ranks, clock)):
                    for entry in log[span.place].overlapping(span.begin, span.end):
                        self._compare(node, span, _nodes(entry.group), kind, by)
            else:
                nodes = self._last_writers(span)
                if nodes:
                    self._compare(node, span, nodes, span.place % num_ranks)

    def _last_writers(self, span: Span) -> tuple[int, ...]:
        log = self.writers[span.place]
        key = (span.place, span.begin, span.end, log.version)
        nodes = self._unions.get(key)
        if nodes is None:
            entries = log.overlapping(span.begin, span.end)
            nodes = self._unions[key] = tuple(sorted({node for entry in entries for node in entry.group.nodes}))
        return nodes

    def _compare(self, node: int, span: Span, others: tuple[int, ...], kind: int, clock: Clock | None = None) -> None:
        """`clock`: of when it may touch these bytes, if that may be before its waits are met."""
        order = self.order
        order.num_pairs += len(others)
        if len(others) == 1:
            if order.after_one(node, others[0], kind, clock):
                return
        elif order.after(node, order.need(others, kind), clock):
            return
        name, rank = order.memory.buffer_of(span.place)
        for other in others:
            if not order.after_one(node, other, kind, clock):
                did = "reads" if kind == READERS else "writes"
                does = "writes" if span.write else "reads"
                where = f"{name}[bytes {span.begin}:{span.end}] on rank {rank}"
                soon = "" if clock is None else " before its waits are met"
                text = f"{order.name(node)} {does} {where}{soon}, and nothing orders it against {order.name(other)}"
                self.findings.add("race", f"{text}, which {did} it")
                return
