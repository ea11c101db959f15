"""Lamport buffers: whenever a task polls an element before its waits are met, it reads zero ("not yet") or the right value.

A task may poll its inputs as soon as its worker may start it (`early_start`); for a spread task, as soon as the first
worker may. It takes any element that is not zero. Therefore an element must be zero or right whenever it can be polled.
That holds if a launch starts with zeros, every element is published once between two resets, and the resets have
happened when a task starts to poll. A task that may end without its waits must know as much as if it had waited.

The second iteration is checked, as for races. It starts with the memory that the first one leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from distmk.abi import Space
from distmk.check.bounds import Accesses, Span
from distmk.check.early_start import EarlyStart
from distmk.check.findings import Findings
from distmk.check.happens_before import HappensBefore
from distmk.sync.vector_clock import VectorClock

NOBODY = -1


def check_lamport(before: HappensBefore, early: EarlyStart, findings: Findings) -> None:
    """Check every poll, publish and reset of polled memory, and every task that may skip its waits."""
    _Lamport(before, early, findings).run()


class Cells:
    """A polled location, cut into cells wherever a span begins or ends.

    For each cell: the node that `reset` it last, and the node that has `published` it since.

    `zeroed`: a launch starts with zeros there. Otherwise a zero does not mean "not published yet", and every write
    counts as a reset.
    """

    __slots__ = ("cuts", "published", "reset", "unions", "zeroed")

    def __init__(self, cuts: list[int], zeroed: bool) -> None:
        self.cuts, self.zeroed = cuts, zeroed
        self.reset, self.published = [NOBODY] * len(cuts), [NOBODY] * len(cuts)
        self.unions: dict[tuple[int, int], tuple[int, ...]] = {}  # cache of `reset_by`

    def record_reset(self, first: int, end: int, node: int) -> None:
        """Note that `node` resets these cells."""
        self.reset[first:end] = [node] * (end - first)
        self.published[first:end] = [NOBODY] * (end - first)
        if self.unions:
            self.unions = {}

    def record_publish(self, first: int, end: int, node: int) -> int:
        """Note that `node` publishes these cells. Returns a node that had already published one of them, or NOBODY."""
        previous = max(self.published[first:end])
        self.published[first:end] = [node] * (end - first)
        return previous

    def reset_by(self, first: int, end: int) -> tuple[int, ...]:
        """The nodes that last reset these cells."""
        nodes = self.unions.get((first, end))
        if nodes is None:
            nodes = self.unions[(first, end)] = tuple(sorted({*self.reset[first:end]} - {NOBODY}))
        return nodes


class CellRange(NamedTuple):
    """A span as cells [first, end)."""

    span: Span
    cells: Cells
    first: int
    end: int


class LamportAccesses(NamedTuple):
    """A task's accesses to polled locations."""

    polls: list[CellRange]
    publishes: list[CellRange]
    resets: list[CellRange]


class _Lamport:
    """Replays two iterations of accesses to polled locations."""

    def __init__(self, before: HappensBefore, early: EarlyStart, findings: Findings) -> None:
        self.before, self.early, self.findings = before, early, findings
        self.tables, self.spans = before.tables, before.accesses.spans
        limit = self.tables.ranks[0].header.zeroed_heap_bytes
        self.ranges = _cell_ranges(before.accesses, limit)
        self.by_task: dict[int, LamportAccesses] = {}
        if not self.ranges:
            return
        for task, spans in enumerate(self.spans):
            here = [cell_range for cell_range in map(self.ranges.get, map(id, spans)) if cell_range]
            if here:
                self.by_task[task] = _classified(here)

    def run(self) -> None:
        self._check_tasks()
        if not self.by_task:
            return
        num_tasks = self.tables.num_tasks
        for task in self.before.order:
            if task in self.by_task:
                self._record(task, self.by_task[task])
        for task in self.before.order:
            if self.findings.full:
                return
            if task in self.by_task:
                accesses = self.by_task[task]
                if accesses.polls and self.early.queued[task]:
                    self._check_polls(task + num_tasks, self.early.clock(task), accesses.polls)
                self._record(task + num_tasks, accesses)

    def _record(self, node: int, accesses: LamportAccesses) -> None:
        for _, cells, first, end in accesses.resets:
            cells.record_reset(first, end, node)
        for each in accesses.publishes:
            previous = each.cells.record_publish(each.first, each.end, node)
            if previous != NOBODY and node >= self.tables.num_tasks:
                by = self.before.describe(previous)
                text = f"publishes {self._describe(each)}, which no task has reset since {by} published it"
                self.findings.add("arrival", f"{self.before.describe(node)} {text}")

    def _check_polls(self, node: int, clock: VectorClock, polls: list[CellRange]) -> None:
        """The resets of polled cells have happened at `clock`, when `node` starts to poll."""
        before, num_ranks = self.before, self.tables.num_ranks
        for each in polls:
            nodes = each.cells.reset_by(each.first, each.end)
            rank = each.span.location % num_ranks
            if not nodes:
                continue
            if len(nodes) == 1:
                if before.after_one(node, nodes[0], rank, clock):
                    continue
            elif before.after(node, before.requirement(nodes, rank), clock):
                continue
            other = next(other for other in nodes if not before.after_one(node, other, rank, clock))
            did = "reset it" if each.cells.zeroed else "written it, and no launch starts with zeros there"
            text = f"may poll {self._describe(each)} before {before.describe(other)} has {did}"
            self.findings.add("arrival", f"{before.describe(node)} {text}")

    def _check_tasks(self) -> None:
        """Check each task by itself, and each task that may skip its waits against the tasks that it waits for."""
        for task, accesses in self.by_task.items():
            if task in self.before.accesses.may_idle:
                text = "may do nothing, and accesses memory that is polled"
                self.findings.add("arrival", f"{self.tables.describe_task(task)} {text}")
            if accesses.polls and not self.early.queued[task]:
                text = (
                    f"polls {self._describe(accesses.polls[0])} before its waits are met, but is in no worker's queue"
                )
                self.findings.add("arrival", f"{self.tables.describe_task(task)} {text}")
        for task in self.before.accesses.skips_waits:
            if self.findings.full:
                return
            self._check_skipped_waits(task)

    def _check_skipped_waits(self, task: int) -> None:
        """A task that may end before its waits are met has polled everything that its producers write on its rank."""
        polls = self.by_task[task].polls if task in self.by_task else []
        polled = {(id(each.cells), cell) for each in polls if each.cells.zeroed for cell in range(each.first, each.end)}
        for event, lag in self.before.signals.waits[task]:
            why = " with lag 1" if lag else ""
            for producer in () if lag else self.before.signals.producers[event]:
                if not self._is_polled(producer, self.before.rank_of[task], polled):
                    name = self.tables.describe_task(producer)
                    why = f": {name}, which fires it, does more than publish what it polls"
                    break
            if why:
                text = f"may end before {self.tables.describe_event(event)}, which it waits for"
                self.findings.add("arrival", f"{self.tables.describe_task(task)} {text}{why}")

    def _is_polled(self, producer: int, rank: int, polled: set[tuple[int, int]]) -> bool:
        """Whether `producer` publishes some of the `polled` cells and writes nothing else, except pushes to other ranks
        than `rank`.
        """
        some = False
        for span in self.spans[producer]:
            if not span.write:
                continue
            if span.location % self.tables.num_ranks != rank:
                if rank not in self.before.pushed[producer]:
                    return False
                continue
            cell_range = self.ranges.get(id(span))
            if cell_range is None or span.resets:
                return False
            if any((id(cell_range.cells), cell) not in polled for cell in range(cell_range.first, cell_range.end)):
                return False
            some = True
        return some

    def _describe(self, cells: CellRange) -> str:
        return self.before.accesses.describe(cells.span)


def _cell_ranges(accesses: Accesses, zeroed_heap_bytes: int) -> dict[int, CellRange]:
    """The spans in polled locations, by their id, which is quicker to look up than their value."""
    allocations = accesses.allocations
    cuts: dict[int, set[int]] = {span.location: set() for span in accesses.distinct if span.polls}
    here = [span for span in accesses.distinct if span.location in cuts]
    for span in here:
        cuts[span.location] |= {span.begin, span.end}
    locations: dict[int, Cells] = {}
    for location, bounds in cuts.items():
        piece = allocations.every[location // allocations.num_ranks]
        zeroed = piece.space == Space.HEAP and piece.offset + piece.num_bytes <= zeroed_heap_bytes
        locations[location] = Cells(sorted(bounds), zeroed)
    ranges = {}
    for span in here:
        cells = locations[span.location]
        ranges[id(span)] = CellRange(
            span, cells, bisect_left(cells.cuts, span.begin), bisect_left(cells.cuts, span.end)
        )
    return ranges


def _classified(ranges: list[CellRange]) -> LamportAccesses:
    accesses = LamportAccesses([], [], [])
    for each in ranges:
        span = each.span
        if span.write:
            (accesses.resets if span.resets or not each.cells.zeroed else accesses.publishes).append(each)
        elif span.polls:
            accesses.polls.append(each)
    return accesses
