"""Whether what is read before a task's waits are met can be told from what is not there yet.

A task may look at an arriving operand as soon as its worker turns to it (`starts`); a spread one as soon as any does. It
takes what is not zero, so whatever it can see then must be zero or the right value: the memory starts zeroed, every
element is written once until it is cleared, and clears are over when somebody starts looking. A task that may even end by
what it has seen then knows no less than if it had waited.

As with races, the second iteration is checked: it begins with what the first one left.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from distmk.abi import Space
from distmk.check.findings import Findings
from distmk.check.memory import Memory, Span
from distmk.check.order import Order
from distmk.check.starts import Starts
from distmk.sync.vector_clock import Clock

NOBODY = -1


class Cells:
    """A place that somebody reads early, cut wherever a span there begins or ends.

    Of each cell: who `cleared` it last, and who has `filled` it since. Where nothing `arrives`, as zeros do not mean
    "not there yet", any write counts as one that clears.
    """

    __slots__ = ("arrives", "cuts", "filled", "reset", "unions")

    def __init__(self, cuts: list[int], arrives: bool) -> None:
        self.cuts, self.arrives = cuts, arrives
        self.reset, self.filled = [NOBODY] * len(cuts), [NOBODY] * len(cuts)
        self.unions: dict[tuple[int, int], tuple[int, ...]] = {}  # of `cleared`, while it does not change

    def clear(self, first: int, end: int, node: int) -> None:
        self.reset[first:end] = [node] * (end - first)
        self.filled[first:end] = [NOBODY] * (end - first)
        if self.unions:
            self.unions = {}

    def fill(self, first: int, end: int, node: int) -> int:
        """Who has filled one of these cells already, if anybody has."""
        before = max(self.filled[first:end])
        self.filled[first:end] = [node] * (end - first)
        return before

    def cleared_by(self, first: int, end: int) -> tuple[int, ...]:
        nodes = self.unions.get((first, end))
        if nodes is None:
            nodes = self.unions[(first, end)] = tuple(sorted({*self.reset[first:end]} - {NOBODY}))
        return nodes


class Part(NamedTuple):
    """A span as a range of cells."""

    span: Span
    cells: Cells
    first: int
    end: int

    def overlaps(self, other: Part) -> bool:
        return self.cells is other.cells and self.first < other.end and other.first < self.end


class Parts(NamedTuple):
    """What a task touches where somebody reads early."""

    looks: list[Part]
    fills: list[Part]
    clears: list[Part]


class Arrivals:
    """Goes through the accesses of two iterations to where somebody reads early."""

    def __init__(self, order: Order, starts: Starts, touched: list[tuple[Span, ...]], findings: Findings) -> None:
        self.order, self.starts, self.findings, self.view, self.spans = order, starts, findings, order.view, touched
        self.parts = _parts(order.memory)
        self.touched: dict[int, Parts] = {}
        if not self.parts:
            return
        for task, spans in enumerate(touched):
            here = [part for part in map(self.parts.get, map(id, spans)) if part]
            if here:
                self.touched[task] = _sorted(here)

    def run(self) -> None:
        self._check_tasks()
        if not self.touched:
            return
        num_tasks = self.view.num_tasks
        for task in self.order.order:
            if task in self.touched:
                self._record(task, self.touched[task])
        for task in self.order.order:
            if self.findings.full:
                return
            node = task + num_tasks
            if task in self.touched:
                parts = self.touched[task]
                if parts.looks and self.starts.queued[task]:
                    self._check_looks(node, self.starts.clock(task), parts.looks)
                self._record(node, parts)

    def _record(self, node: int, parts: Parts) -> None:
        for _, cells, first, end in parts.clears:
            cells.clear(first, end, node)
        for part in parts.fills:
            before = part.cells.fill(part.first, part.end, node)
            if before != NOBODY and node >= self.view.num_tasks:
                text = f"fills {self._where(part)}, which nobody has cleared since {self.order.name(before)} filled it"
                self.findings.add("arrival", f"{self.order.name(node)} {text}")

    def _check_looks(self, node: int, clock: Clock, looks: list[Part]) -> None:
        """What `node` can see as soon as `clock` is behind it."""
        order, num_ranks = self.order, self.view.num_ranks
        for part in looks:
            nodes = part.cells.cleared_by(part.first, part.end)
            rank = part.span.place % num_ranks
            if not nodes:
                continue
            if len(nodes) == 1:
                if order.after_one(node, nodes[0], rank, clock):
                    continue
            elif order.after(node, order.need(nodes, rank), clock):
                continue
            other = next(other for other in nodes if not order.after_one(node, other, rank, clock))
            text = f"may look at {self._where(part)} before {order.name(other)} has"
            did = "cleared it" if part.cells.arrives else "written it, and no launch starts with zeros there"
            self.findings.add("arrival", f"{order.name(node)} {text} {did}")

    def _check_tasks(self) -> None:
        """What can be said of each task by itself, and of those that it waits for."""
        nothing = Parts([], [], [])
        for task, parts in self.touched.items():
            if parts.looks and not self.starts.queued[task]:
                text = f"looks at {self._where(parts.looks[0])} before its waits are met, but is in no worker's queue"
                self.findings.add("arrival", f"{self.view.task_name(task)} {text}")
            for part in parts.fills if parts.clears else ():
                if any(part.overlaps(clear) for clear in parts.clears):
                    text = f"both fills and clears bytes of {self._where(part)}"
                    self.findings.add("arrival", f"{self.view.task_name(task)} {text}")
        for task in self.order.memory.skipping:
            if self.findings.full:
                return
            self._check_skip(task, self.touched.get(task, nothing).looks)

    def _check_skip(self, task: int, looks: list[Part]) -> None:
        """A task that may end before its waits are met has seen all that those it waits for leave on its rank."""
        seen = {(id(part.cells), cell) for part in looks if part.cells.arrives for cell in range(part.first, part.end)}
        for event, lag in self.order.signals.waits[task]:
            producers = self.order.signals.producers[event]
            why = " with lag 1" if lag else ""
            for producer in () if lag else producers:
                if not self._is_seen(producer, self.order.rank_of[task], seen):
                    name = self.view.task_name(producer)
                    why = f": {name}, which fires it, does more than fill what it looks at"
                    break
            if why:
                text = f"may end before {self.view.event_name(event)}, which it waits for"
                self.findings.add("arrival", f"{self.view.task_name(task)} {text}{why}")

    def _is_seen(self, producer: int, rank: int, seen: set[tuple[int, int]]) -> bool:
        """Whether these cells are all that `producer` writes, but for what it pushes to others than `rank`."""
        some = False
        for span in self.spans[producer]:
            if not span.write:
                continue
            if span.place % self.view.num_ranks != rank:
                if rank not in self.order.pushed[producer]:
                    return False
                continue
            part = self.parts.get(id(span))
            if part is None or span.clears:
                return False
            if any((id(part.cells), cell) not in seen for cell in range(part.first, part.end)):
                return False
            some = True
        return some

    def _where(self, part: Part) -> str:
        name, rank = self.order.memory.buffer_of(part.span.place)
        return f"{name}[bytes {part.span.begin}:{part.span.end}] on rank {rank}"


def _parts(memory: Memory) -> dict[int, Part]:
    """The spans on places that somebody reads early, by their id, as a look-up by value takes longer."""
    cuts: dict[int, set[int]] = {span.place: set() for span in memory.distinct if span.early}
    here = [span for span in memory.distinct if span.place in cuts]
    for span in here:
        cuts[span.place] |= {span.begin, span.end}
    limit = memory.view.parts[0].header.zeroed_heap_bytes
    places: dict[int, Cells] = {}
    for place, bounds in cuts.items():
        piece = memory.pieces[place // memory.view.num_ranks]
        arrives = piece.space == Space.HEAP and piece.offset + piece.num_bytes <= limit
        places[place] = Cells(sorted(bounds), arrives)
    parts = {}
    for span in here:
        cells = places[span.place]
        parts[id(span)] = Part(span, cells, bisect_left(cells.cuts, span.begin), bisect_left(cells.cuts, span.end))
    return parts


def _sorted(parts: list[Part]) -> Parts:
    found = Parts([], [], [])
    for part in parts:
        span = part.span
        if span.write:
            (found.clears if span.clears or not part.cells.arrives else found.fills).append(part)
        elif span.early:
            found.looks.append(part)
    return found
