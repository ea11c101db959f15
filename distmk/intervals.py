"""Who touched which part of a buffer since it was last overwritten: intervals and the tasks that read or wrote them."""

from __future__ import annotations

from bisect import bisect_left


class Entry:
    """Tasks that touched exactly [begin, end)."""

    __slots__ = ("begin", "end", "frozen", "nodes")

    def __init__(self, begin: int, end: int, nodes: list[int], frozen: tuple[int, ...] | None = None) -> None:
        self.begin, self.end, self.nodes = begin, end, nodes
        self.frozen = frozen

    def freeze(self) -> tuple[int, ...]:
        """The tasks as a tuple that is the same object until the entry changes, so that it can be a cheap key."""
        if self.frozen is None:
            self.frozen = tuple(self.nodes)
        return self.frozen


class Tier:
    """Disjoint entries in order, beside a list of where they begin."""

    __slots__ = ("begins", "entries")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.entries: list[Entry] = []

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        first = last = bisect_left(self.begins, end)
        while first and self.entries[first - 1].end > begin:
            first -= 1
        return self.entries[first:last]

    def add(self, entry: Entry) -> None:
        at = bisect_left(self.begins, entry.begin)
        self.begins.insert(at, entry.begin)
        self.entries.insert(at, entry)

    def remove(self, entry: Entry) -> None:
        at = bisect_left(self.begins, entry.begin)
        del self.begins[at], self.entries[at]


class IntervalLog:
    """Entries by interval. They are kept in tiers of disjoint ones, so that a look-up is a bisection a tier."""

    def __init__(self) -> None:
        self._exact: dict[tuple[int, int], Entry] = {}
        self._tiers: list[Tier] = []
        self.version = 0

    def add(self, begin: int, end: int, node: int) -> None:
        self.version += 1
        entry = self._exact.get((begin, end))
        if entry is not None:
            entry.nodes.append(node)
            entry.frozen = None
            return
        self._insert(Entry(begin, end, [node]))

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        if len(self._tiers) == 1:
            return self._tiers[0].overlapping(begin, end)
        return [entry for tier in self._tiers for entry in tier.overlapping(begin, end)]

    def cut(self, begin: int, end: int) -> None:
        """Forget what was known of [begin, end)."""
        self.version += 1
        for tier in self._tiers:
            for entry in tier.overlapping(begin, end):
                tier.remove(entry)
                del self._exact[(entry.begin, entry.end)]
                for left, right in ((entry.begin, begin), (end, entry.end)):
                    if left < right:
                        self._keep(Entry(left, right, list(entry.nodes), entry.freeze()))

    def _keep(self, entry: Entry) -> None:
        same = self._exact.get((entry.begin, entry.end))
        if same is None:
            self._insert(entry)
        else:
            same.nodes += [node for node in entry.nodes if node not in same.nodes]
            same.frozen = None

    def _insert(self, entry: Entry) -> None:
        self._exact[(entry.begin, entry.end)] = entry
        for tier in self._tiers:
            if not tier.overlapping(entry.begin, entry.end):
                tier.add(entry)
                return
        self._tiers.append(Tier())
        self._tiers[-1].add(entry)
