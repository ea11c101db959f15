"""No race: any two conflicting accesses are ordered.

A task that may idle stands for nothing that came before it, so earlier accesses to what it writes stay to be compared with.
Tasks that write the rows of different owners in the same bytes need no order between them: each is compared with what came
before the first of them, and what follows with all of them.

As for `happens_before`, two iterations are enough. A task accesses memory after its waits, unless it polls: then it may
write as soon as its worker starts it (`early_start`), and every access that it overwrites must have happened by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from distmk.check.bounds import Span
from distmk.check.early_start import EarlyStart, Polled
from distmk.check.findings import Findings
from distmk.check.happens_before import READ, HappensBefore
from distmk.sync.interval_map import Group, IntervalMap
from distmk.sync.vector_clock import VectorClock

NO_POLLS: Polled = frozenset()


def check_races(before: HappensBefore, early: EarlyStart, findings: Findings) -> int:
    """Report every race; returns the number of pairs of accesses that were compared."""
    return _Races(before, early, findings).run()


def _nodes(group: Group) -> tuple[int, ...]:
    """The nodes of a group as a tuple: the same object until they change."""
    if group.note is None:
        group.note = tuple(group.nodes)
    nodes: tuple[int, ...] = group.note
    return nodes


def _to_compare(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Without reads of bytes that the task also writes, as a write must be ordered against all that a read must be. Polling
    reads stay: they happen at another time than the write.
    """
    written = {span[1:4] for span in spans if span.write}
    return tuple([span for span in spans if span.write or span.polls or span[1:4] not in written])


@dataclass
class DividedWrite:
    """Writes of the rows of `owners` in the same bytes in one iteration. before: who read or wrote (rank) them last before that.

    versions: of the location's readers and writers behind the last of these writes.
    """

    iteration: int
    before: list[tuple[int, tuple[int, ...]]]
    owners: set[int | None] = field(default_factory=set)
    versions: tuple[int, int] = (0, 0)


class Location:
    """The latest accesses to an allocation on a rank. `divided`: by begin and end, the last one."""

    __slots__ = ("_last_writers", "_version", "divided", "rank", "readers", "writers")

    def __init__(self, rank: int) -> None:
        self.rank, self.readers, self.writers = rank, IntervalMap(), IntervalMap()
        self.divided: dict[tuple[int, int], DividedWrite] = {}
        self._last_writers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._version = 0  # of `writers`, for which `_last_writers` holds

    def last_writers(self, begin: int, end: int) -> tuple[int, ...]:
        """The tasks that wrote any of these bytes last."""
        if self._version != self.writers.version:
            self._last_writers, self._version = {}, self.writers.version
        nodes = self._last_writers.get((begin, end))
        if nodes is None:
            entries = self.writers.overlapping(begin, end)
            if len(entries) == 1 and len(entries[0].group.nodes) == 1:
                return _nodes(entries[0].group)
            nodes = tuple(sorted({node for entry in entries for node in entry.group.nodes}))
            self._last_writers[(begin, end)] = nodes
        return nodes

    def divided_write(self, span: Span, iteration: int) -> DividedWrite | None:
        """The write of the same bytes that `span` is a part of, if others have begun it and nothing has come in between."""
        divided = self.divided.get(span[2:4]) if span.owner is not None else None
        if divided is None or span.owner in divided.owners:
            return None
        same = divided.iteration == iteration and divided.versions == (self.readers.version, self.writers.version)
        return divided if same else None

    def write(self, node: int, span: Span, iteration: int, may_idle: bool) -> None:
        """Record a write by `node`."""
        begin, end, owner = span.begin, span.end, span.owner
        divided = None if owner is None else self.divided_write(span, iteration)
        if divided is not None or may_idle:
            self.writers.add(begin, end, Group([node]))
        else:
            if owner is not None:
                before = [(READ, _nodes(entry.group)) for entry in self.readers.overlapping(begin, end)]
                before += [(self.rank, _nodes(entry.group)) for entry in self.writers.overlapping(begin, end)]
                divided = self.divided[(begin, end)] = DividedWrite(iteration, before)
            self.readers.cut(begin, end)
            self.writers.replace(begin, end, Group([node]))
        if divided is not None:
            divided.owners.add(owner)
            divided.versions = self.readers.version, self.writers.version


class _Races:
    """Replays the accesses in an order in which they can happen, and compares each with the latest ones to its bytes."""

    def __init__(self, before: HappensBefore, early: EarlyStart, findings: Findings) -> None:
        self.before, self.early, self.findings = before, early, findings
        self.num_tasks, num_ranks = before.num_tasks, before.tables.num_ranks
        self.spans = [_to_compare(spans) for spans in before.accesses.spans]
        self.locations = {span.location: Location(span.location % num_ranks) for span in before.accesses.distinct}
        self.num_pairs = 0

    def run(self) -> int:
        """Compares the second iteration with itself and the first; the first with itself would give the same."""
        for task, spans in self._left_by_an_iteration():
            self._record(task, 0, spans)
        for task in self.before.order:
            if self.findings.full:
                break
            self._check(task)
            self._record(task, 1, self.spans[task])
        return self.num_pairs

    def _left_by_an_iteration(self) -> Iterator[tuple[int, list[Span]]]:
        """Every task with its accesses, without those to bytes that a later task of the iteration overwrites all at once: they
        are forgotten then. In locations where a write need not overwrite what was there, all accesses are kept.
        """
        order, may_idle = self.before.order, self.before.accesses.may_idle
        overwritten: dict[tuple[int, int, int], int] = {}  # by location, begin and end: position of the last write
        keeping = {span.location for span in self.before.accesses.distinct if span.owner is not None}
        keeping |= {span.location for task in may_idle for span in self.spans[task]}
        for position, task in enumerate(order):
            for span in self.spans[task]:
                if span[0] and span[1] not in keeping:
                    overwritten[span[1:4]] = position
        for position, task in enumerate(order):
            yield task, [span for span in self.spans[task] if overwritten.get(span[1:4], -1) <= position]

    def _record(self, task: int, iteration: int, spans: Iterable[Span]) -> None:
        node, may_idle, reads = task + iteration * self.num_tasks, task in self.before.accesses.may_idle, []
        for span in spans:
            if span[0]:
                self.locations[span[1]].write(node, span, iteration, may_idle)
            else:
                reads.append(span)
        for span in reads:
            self.locations[span[1]].readers.add(span[2], span[3], Group([node]))

    def _check(self, task: int) -> None:
        """Compare the accesses of a task in the second iteration."""
        node, polls = task + self.num_tasks, self.early.polls.get(task, NO_POLLS)
        start = self.early.write_clock(task) if polls and self.early.queued[task] else None
        for span in self.spans[task]:
            write, at, begin, end, _, resets, owner = span
            location = self.locations[at]
            if not write:
                if nodes := location.last_writers(begin, end):
                    self._compare(node, span, nodes, location.rank)
            elif owner is not None and (divided := location.divided_write(span, 1)):
                for did, nodes in divided.before:
                    self._compare(node, span, nodes, did, start)
            else:
                for entry in location.readers.overlapping(begin, end):
                    self._compare(node, span, _nodes(entry.group), READ, start)
                # A task resets what it has polled, so that was written before.
                clock = None if resets and span[1:4] in polls else start
                for entry in location.writers.overlapping(begin, end):
                    self._compare(node, span, _nodes(entry.group), location.rank, clock)

    def _compare(
        self, node: int, span: Span, others: tuple[int, ...], did: int, clock: VectorClock | None = None
    ) -> None:
        """Report a race of `node` with `others`, which have read (`did` READ) or written to rank `did`.

        `clock`: when `node` may access these bytes, where that may be before its waits are met.
        """
        before = self.before
        self.num_pairs += len(others)
        if len(others) == 1:
            if before.after_one(node, others[0], did, clock):
                return
        elif before.after(node, before.requirement(others, did), clock):
            return
        for other in others:
            if not before.after_one(node, other, did, clock):
                verb, other_verb = "writes" if span.write else "reads", "reads" if did == READ else "writes"
                when = "" if clock is None else " before its waits are met"
                access = f"{before.describe(node)} {verb} {before.accesses.describe(span)}{when}"
                text = f"{access}, and nothing orders it against {before.describe(other)}, which {other_verb} it"
                self.findings.add("race", text)
                return
