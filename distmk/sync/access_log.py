"""Access log of a buffer on a rank: the last writer of each interval and the nodes that have read it since.

The log gives the dependencies of the next task that accesses the buffer.
"""

from __future__ import annotations

from bisect import bisect_left

from distmk.sync.happens_before import READ, Dependency, HappensBefore
from distmk.sync.interval_map import Group, IntervalMap


class Written:
    """The interval [begin, end) as `writer` left it, and the nodes that have since read exactly that interval.

    before: if the writers have written rows that their ranks own, the dependencies of the first of them; else None.
    """

    __slots__ = ("before", "begin", "end", "readers", "writer")

    def __init__(self, begin: int, end: int, writer: Dependency, readers: Group | None = None) -> None:
        self.begin, self.end, self.writer, self.readers = begin, end, writer, readers
        self.before: list[Dependency] | None = None

    def piece(self, begin: int, end: int) -> Written:
        """The part [begin, end) of the interval."""
        if self.readers is not None:
            self.readers.shared = True
        return Written(begin, end, self.writer, self.readers)


class AccessLog:
    """Writers and readers of a buffer on `rank`, by interval.

    A task that may idle implies nothing about the tasks before it. After its write, an interval has several writers. A
    task that overwrites what it has read must also come after the writer.

    Most tasks read or write exactly an interval that one task wrote; a bisection finds it. Other reads go to an
    interval map.
    """

    __slots__ = ("_begins", "_joint_writers", "_order", "_other_readers", "_written", "rank")

    def __init__(self, rank: int, order: HappensBefore) -> None:
        self.rank = rank
        self._order = order
        self._written: list[Written] = []  # disjoint, in order
        self._begins: list[int] = []  # begins of `_written`
        self._other_readers: IntervalMap | None = None
        self._joint_writers: dict[
            tuple[int, int], Dependency
        ] = {}  # intervals with several writers; valid until the next write

    def read(self, begin: int, end: int, reader: Group) -> Dependency | None:
        """Record that a node, alone in the group `reader`, reads [begin, end).

        Returns the dependency on the writers, or None.
        """
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin and self._written[at].end == end:
            interval = self._written[at]
            interval.readers = interval.readers.plus(reader) if interval.readers else reader
            return interval.writer
        if self._other_readers is None:
            self._other_readers = IntervalMap()
        self._other_readers.add(begin, end, reader)
        return self._joint_writers.get((begin, end)) or self._writers(begin, end)

    def write(self, begin: int, end: int, node: int) -> list[Dependency]:
        """Record that `node` writes [begin, end). Returns the dependencies on the writers and readers before it."""
        writer = self._order.on_node(node, self.rank)
        if self._joint_writers:
            self._joint_writers.clear()
        if self._order.may_idle(node):
            return self._write_perhaps(begin, end, node)
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin and self._written[at].end == end:
            interval = self._written[at]
            overwritten = [Written(begin, end, interval.writer, interval.readers)]
            interval.writer, interval.readers, interval.before = writer, None, None
        else:
            overwritten = self._replace(begin, end, writer)
        readers = [old.readers for old in overwritten if old.readers is not None]
        if self._other_readers is not None:
            readers += [entry.group for entry in self._other_readers.cut(begin, end)]
        return self._dependencies(node, overwritten, readers)

    def write_owned(self, begin: int, end: int, node: int) -> list[Dependency]:
        """Record that `node` writes the rows of [begin, end) that its rank owns. Returns the dependencies, as `write` does.

        The node need not come after the nodes of other ranks that have written their rows in this iteration. It comes
        after everything that these came after. A reader of the interval comes after all of them.
        """
        at = bisect_left(self._begins, begin)
        interval = self._written[at] if at < len(self._begins) and self._begins[at] == begin else None
        if interval is None or interval.end != end or not self._may_join(interval, node):
            dependencies = self.write(begin, end, node)
            self._written[bisect_left(self._begins, begin)].before = dependencies
            return dependencies
        if self._joint_writers:
            self._joint_writers.clear()
        interval.writer = self._order.on_nodes({*interval.writer.nodes, node}, self.rank)
        return list(interval.before or ())

    def _may_join(self, interval: Written, node: int) -> bool:
        """Whether `node` writes other rows of the interval than its writers did, and no node has read it since."""
        is_read = interval.readers is not None or (
            self._other_readers is not None and self._other_readers.overlapping(interval.begin, interval.end)
        )
        return (
            interval.before is not None and not is_read and self._order.own_other_rows({*interval.writer.nodes, node})
        )

    def _write_perhaps(self, begin: int, end: int, node: int) -> list[Dependency]:
        """`write` for a node that may idle: the writers and readers before it stay in the log."""
        first, last = self._span(begin, end)
        before = [Written(old.begin, old.end, old.writer, old.readers) for old in self._written[first:last]]
        nodes = {node} | {writer for old in before for writer in old.writer.nodes}
        self._replace(begin, end, self._order.on_nodes(nodes, self.rank))
        readers = [old.readers for old in before if old.readers is not None]
        if self._other_readers is None:
            self._other_readers = IntervalMap()
        readers += [entry.group for entry in self._other_readers.overlapping(begin, end)]
        for old in before:
            if old.readers is not None:
                old.readers.shared = True
                self._other_readers.add(max(begin, old.begin), min(end, old.end), old.readers)
        return self._dependencies(node, before, readers)

    def _dependencies(self, node: int, overwritten: list[Written], readers: list[Group]) -> list[Dependency]:
        """The dependencies of `node` on the writers and readers of the intervals that it overwrites."""
        dependencies = [old.writer for old in overwritten if self._is_listed(old) and old.writer.latest != node]
        for group in readers:
            if group.nodes[-1] != node:
                dependencies.append(self._on_readers(group))
            elif others := set(group.nodes) - {node}:  # a task does not depend on itself
                dependencies.append(self._order.on_nodes(others, READ))
        return dependencies

    def _is_listed(self, old: Written) -> bool:
        """Whether the writer must be listed beside the readers.

        If no reader may idle, the readers come after it and imply it.
        """
        return old.readers is None or any(map(self._order.may_idle, old.readers.nodes))

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        """Indices [first, last) of the written intervals that overlap [begin, end)."""
        first = last = bisect_left(self._begins, end)
        while first and self._written[first - 1].end > begin:
            first -= 1
        return first, last

    def _writers(self, begin: int, end: int) -> Dependency | None:
        first, last = self._span(begin, end)
        if last - first <= 1:
            return self._written[first].writer if last > first else None
        nodes = {node for interval in self._written[first:last] for node in interval.writer.nodes}
        joint = self._joint_writers[(begin, end)] = self._order.on_nodes(nodes, self.rank)
        return joint

    def _replace(self, begin: int, end: int, writer: Dependency) -> list[Written]:
        """Make [begin, end) one interval of `writer`.

        Returns the intervals that it overlaps; the log keeps their parts outside.
        """
        first, last = self._span(begin, end)
        overwritten = self._written[first:last]
        pieces = [Written(begin, end, writer)]
        if overwritten and overwritten[0].begin < begin:
            pieces.insert(0, overwritten[0].piece(overwritten[0].begin, begin))
        if overwritten and overwritten[-1].end > end:
            pieces.append(overwritten[-1].piece(end, overwritten[-1].end))
        self._written[first:last] = pieces
        self._begins[first:last] = [piece.begin for piece in pieces]
        return overwritten

    def _on_readers(self, readers: Group) -> Dependency:
        if readers.note is None:
            readers.note = self._order.on_nodes(readers.nodes, READ)
        known: Dependency = readers.note
        return known
