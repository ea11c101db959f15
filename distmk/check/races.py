"""No races: any two conflicting accesses are ordered.

A task that may idle proves nothing about the tasks before it, so later accesses to its bytes are also compared with the
accesses before it. Tasks that write rows of different owners in the same bytes need no order between them. Each of them
is compared with what came before the first of them; later accesses are compared with all of them.

Two iterations are enough, as for `happens_before`. A task accesses memory after its waits, unless it polls. A polling
task may write as soon as its worker starts it (`early_start`), and every access to the bytes that it overwrites must
have happened by then.
"""

from __future__ import annotations

from collections import defaultdict
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
    """The nodes of a group as a tuple. It is the same object until the group changes."""
    if group.note is None:
        group.note = tuple(group.nodes)
    nodes: tuple[int, ...] = group.note
    return nodes


def _to_compare(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans without reads of bytes that the task also writes, because the write is ordered against more accesses.

    Polling reads stay, because they happen at another time than the write.
    """
    written = {span[1:4] for span in spans if span.write}
    return tuple([span for span in spans if span.write or span.polls or span[1:4] not in written])


@dataclass
class DividedWrite:
    """Writes of different owners' rows in the same bytes in one iteration.

    before: the nodes that last accessed the bytes before these writes, each with READ or the rank that they wrote to.
    versions: of the location's readers and writers after the latest of these writes.
    """

    iteration: int
    before: list[tuple[int, tuple[int, ...]]]
    owners: set[int | None] = field(default_factory=set)
    versions: tuple[int, int] = (0, 0)


class _Races:
    """Replays the accesses in a possible order, and compares each with the latest accesses to the same bytes."""

    def __init__(self, before: HappensBefore, early: EarlyStart, findings: Findings) -> None:
        self.before, self.early, self.findings = before, early, findings
        self.spans = [_to_compare(spans) for spans in before.accesses.spans]
        self.readers: dict[int, IntervalMap] = defaultdict(IntervalMap)  # by location
        self.writers: dict[int, IntervalMap] = defaultdict(IntervalMap)
        self.divided: dict[tuple[int, int, int], DividedWrite] = {}  # the last one, by location, begin and end
        self.num_pairs = 0
        self._writers_of: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def run(self) -> int:
        """Compare the second iteration with itself and with the first.

        Comparing the first with itself would find the same races.
        """
        num_tasks = self.before.tables.num_tasks
        for task in self.before.order:
            self._record(task, self.spans[task])
        for task in self.before.order:
            if self.findings.full:
                break
            self._check(task + num_tasks, self.spans[task])
            self._record(task + num_tasks, self.spans[task])
        return self.num_pairs

    def _record(self, node: int, spans: tuple[Span, ...]) -> None:
        may_idle = node % self.before.tables.num_tasks in self.before.accesses.may_idle
        for span in spans:
            if span.write:
                self._record_write(node, span, may_idle)
        for span in spans:
            if not span.write:
                self.readers[span.location].add(span.begin, span.end, Group([node]))

    def _record_write(self, node: int, span: Span, may_idle: bool) -> None:
        _, location, begin, end, *_ = span
        readers, writers = self.readers[location], self.writers[location]
        divided = self._divided_write(node, span)
        if divided is None and not may_idle:
            before = [(READ, _nodes(entry.group)) for entry in readers.cut(begin, end)]
            before += [
                (location % self.before.tables.num_ranks, _nodes(entry.group)) for entry in writers.cut(begin, end)
            ]
            if span.owner is not None:
                divided = self.divided[span[1:4]] = DividedWrite(node // self.before.tables.num_tasks, before)
        writers.add(begin, end, Group([node]))
        if divided is not None and span.owner is not None:
            divided.owners.add(span.owner)
            divided.versions = readers.version, writers.version

    def _divided_write(self, node: int, span: Span) -> DividedWrite | None:
        """The divided write that `node` joins, if other owners have begun it and nothing has accessed the bytes since."""
        divided = self.divided.get(span[1:4]) if span.owner is not None else None
        if divided is None or span.owner in divided.owners:
            return None
        versions = self.readers[span.location].version, self.writers[span.location].version
        same = divided.iteration == node // self.before.tables.num_tasks and divided.versions == versions
        return divided if same else None

    def _check(self, node: int, spans: tuple[Span, ...]) -> None:
        num_ranks, task = self.before.tables.num_ranks, node % self.before.tables.num_tasks
        polls = self.early.polls.get(task, NO_POLLS)
        start = self.early.write_clock(task) if polls and self.early.queued[task] else None
        for span in spans:
            rank = span.location % num_ranks
            if span.write:
                # A task that resets polled bytes has received them, so their writers are done with them.
                clock = None if span.resets and span[1:4] in polls else start
                if divided := self._divided_write(node, span):
                    for did, nodes in divided.before:
                        self._compare(node, span, nodes, did, start)
                    continue
                for log, did, by in ((self.readers, READ, start), (self.writers, rank, clock)):
                    for entry in log[span.location].overlapping(span.begin, span.end):
                        self._compare(node, span, _nodes(entry.group), did, by)
            else:
                nodes = self._last_writers(span)
                if nodes:
                    self._compare(node, span, nodes, rank)

    def _last_writers(self, span: Span) -> tuple[int, ...]:
        log = self.writers[span.location]
        key = (span.location, span.begin, span.end, log.version)
        nodes = self._writers_of.get(key)
        if nodes is None:
            entries = log.overlapping(span.begin, span.end)
            nodes = self._writers_of[key] = tuple(sorted({node for entry in entries for node in entry.group.nodes}))
        return nodes

    def _compare(
        self, node: int, span: Span, others: tuple[int, ...], did: int, clock: VectorClock | None = None
    ) -> None:
        """Report a race of `node` with `others`, which have read (`did` READ) or written to rank `did`.

        `clock`: the time from which `node` may access these bytes, if that may be before its waits are met.
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
