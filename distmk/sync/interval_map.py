"""Who touched which part of a buffer since it was last overwritten: intervals and the tasks that read or wrote them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Group:
    """Tasks that did the same. `note` is what the log's user has worked out about them, dropped as soon as they change.

    A `shared` group belongs to several entries and never changes.
    """

    __slots__ = ("nodes", "note", "shared")

    def __init__(self, nodes: list[int], note: Any = None, shared: bool = False) -> None:
        self.nodes, self.note, self.shared = nodes, note, shared

    def plus(self, other: Group) -> Group:
        """The tasks of both, in this group unless it is shared."""
        if self.shared:
            return Group(self.nodes + other.nodes)
        self.nodes += other.nodes
        self.note = None
        return self


class Entry:
    """Tasks that touched exactly [begin, end). The pieces of a cut entry share one group."""

    __slots__ = ("begin", "end", "group")

    def __init__(self, begin: int, end: int, group: Group) -> None:
        self.begin, self.end, self.group = begin, end, group

    def piece(self, begin: int, end: int) -> Entry:
        self.group.shared = True
        return Entry(begin, end, self.group)


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

    def cut(self, begin: int, end: int) -> list[Entry]:
        """Remove and return what overlaps [begin, end), but for what sticks out."""
        first = last = bisect_left(self.begins, end)
        while first and self.entries[first - 1].end > begin:
            first -= 1
        found = self.entries[first:last]
        if found:
            pieces = []
            if found[0].begin < begin:
                pieces.append(found[0].piece(found[0].begin, begin))
            if found[-1].end > end:
                pieces.append(found[-1].piece(end, found[-1].end))
            self.entries[first:last] = pieces
            self.begins[first:last] = [piece.begin for piece in pieces]
        return found


class IntervalLog:
    """Entries by interval. They are kept in tiers of disjoint ones, so that a look-up is a bisection a tier."""

    def __init__(self) -> None:
        self._tiers: list[Tier] = [Tier()]
        self.version = 0

    def add(self, begin: int, end: int, group: Group) -> None:
        """The tasks of `group` touched [begin, end)."""
        self.version += 1
        home = None
        for tier in self._tiers:
            at = bisect_left(tier.begins, begin)
            if at < len(tier.begins) and tier.begins[at] == begin and tier.entries[at].end == end:
                entry = tier.entries[at]
                entry.group = entry.group.plus(group)
                return
            if (
                home is None
                and (at == len(tier.begins) or tier.begins[at] >= end)
                and (not at or tier.entries[at - 1].end <= begin)
            ):
                home = tier, at
        if home is None:
            self._tiers.append(Tier())
            home = self._tiers[-1], 0
        tier, at = home
        tier.begins.insert(at, begin)
        tier.entries.insert(at, Entry(begin, end, group))

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        if len(self._tiers) == 1:
            return self._tiers[0].overlapping(begin, end)
        return [entry for tier in self._tiers for entry in tier.overlapping(begin, end)]

    def cut(self, begin: int, end: int) -> list[Entry]:
        """Forget and return what was known of [begin, end)."""
        self.version += 1
        if len(self._tiers) == 1:
            return self._tiers[0].cut(begin, end)
        return [entry for tier in self._tiers for entry in tier.cut(begin, end)]
