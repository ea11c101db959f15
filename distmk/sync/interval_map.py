"""Interval map of a buffer: which tasks have read, or written, each interval since it was last overwritten."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Group:
    """Nodes with the same access.

    `note` is a value that the map's user derived from `nodes`; it is dropped when they change.

    A `shared` group belongs to several entries and never changes.
    """

    __slots__ = ("nodes", "note", "shared")

    def __init__(self, nodes: list[int], note: Any = None, shared: bool = False) -> None:
        self.nodes, self.note, self.shared = nodes, note, shared

    def plus(self, other: Group) -> Group:
        """The nodes of both groups: this group, extended, or a new group if this one is shared."""
        if self.shared:
            return Group(self.nodes + other.nodes)
        self.nodes += other.nodes
        self.note = None
        return self


class Entry:
    """The nodes that accessed exactly [begin, end). The pieces of a split entry share one group."""

    __slots__ = ("begin", "end", "group")

    def __init__(self, begin: int, end: int, group: Group) -> None:
        self.begin, self.end, self.group = begin, end, group

    def piece(self, begin: int, end: int) -> Entry:
        """The part [begin, end) of the entry."""
        self.group.shared = True
        return Entry(begin, end, self.group)


class Tier:
    """Disjoint entries in order, and a list of their begins for bisection."""

    __slots__ = ("begins", "entries")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.entries: list[Entry] = []

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Indices [first, last) of the entries that overlap [begin, end)."""
        first = last = bisect_left(self.begins, end)
        while first and self.entries[first - 1].end > begin:
            first -= 1
        return first, last

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        first, last = self.span(begin, end)
        return self.entries[first:last]

    def cut(self, begin: int, end: int) -> list[Entry]:
        """Remove [begin, end), and return the entries that overlapped it. Their parts outside stay."""
        first, last = self.span(begin, end)
        if first == last:
            return []
        overlapping = self.entries[first:last]
        if len(overlapping) == 1 and overlapping[0].begin == begin and overlapping[0].end == end:
            del self.entries[first], self.begins[first]
        else:
            pieces = []
            if overlapping[0].begin < begin:
                pieces.append(overlapping[0].piece(overlapping[0].begin, begin))
            if overlapping[-1].end > end:
                pieces.append(overlapping[-1].piece(end, overlapping[-1].end))
            self.entries[first:last] = pieces
            self.begins[first:last] = [piece.begin for piece in pieces]
        return overlapping


class IntervalMap:
    """Entries by interval, which may overlap.

    They are kept in tiers of disjoint entries, so that a look-up bisects each tier.

    `version` changes with every change of the map.
    """

    def __init__(self) -> None:
        self._tiers: list[Tier] = [Tier()]
        self.version = 0

    def add(self, begin: int, end: int, group: Group) -> None:
        """Add the nodes of `group`, which accessed [begin, end), to the entry of exactly that interval, or make a new entry."""
        self.version += 1
        free = None  # the first tier with room for the interval, and the index there
        for tier in self._tiers:
            at = bisect_left(tier.begins, begin)
            if at < len(tier.begins) and tier.begins[at] == begin and tier.entries[at].end == end:
                entry = tier.entries[at]
                entry.group = entry.group.plus(group)
                return
            if (
                free is None
                and (at == len(tier.begins) or tier.begins[at] >= end)
                and (not at or tier.entries[at - 1].end <= begin)
            ):
                free = tier, at
        if free is None:
            self._tiers.append(Tier())
            free = self._tiers[-1], 0
        tier, at = free
        tier.begins.insert(at, begin)
        tier.entries.insert(at, Entry(begin, end, group))

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        """The entries that overlap [begin, end)."""
        if len(self._tiers) == 1:
            return self._tiers[0].overlapping(begin, end)
        return [entry for tier in self._tiers for entry in tier.overlapping(begin, end)]

    def cut(self, begin: int, end: int) -> list[Entry]:
        """Remove [begin, end), and return the entries that overlapped it. Their parts outside stay."""
        self.version += 1
        if len(self._tiers) == 1:
            return self._tiers[0].cut(begin, end)
        return [entry for tier in self._tiers for entry in tier.cut(begin, end)]

    def replace(self, begin: int, end: int, group: Group) -> None:
        """Remove [begin, end), and add an entry of exactly that interval. Most often the one that is there gets the group."""
        tier = self._tiers[0]
        at = bisect_left(tier.begins, begin)
        if len(self._tiers) == 1 and at < len(tier.begins) and tier.begins[at] == begin and tier.entries[at].end == end:
            self.version += 1
            tier.entries[at].group = group
        else:
            self.cut(begin, end)
            self.add(begin, end, group)
