"""Who touched which part of a buffer since it was last overwritten: intervals and the tasks that read or wrote them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Entry:
    """Tasks that touched exactly [begin, end).

    Pieces of a cut entry share its tasks and `note`: what the log's user has worked out about these tasks, dropped as
    soon as they change.
    """

    __slots__ = ("begin", "end", "nodes", "note")

    def __init__(self, begin: int, end: int, nodes: tuple[int, ...] | list[int], note: Any = None) -> None:
        self.begin, self.end, self.nodes, self.note = begin, end, nodes, note

    def freeze(self) -> tuple[int, ...]:
        """The tasks as a tuple, the same object until the entry changes."""
        if not isinstance(self.nodes, tuple):
            self.nodes = tuple(self.nodes)
        return self.nodes

    def add(self, node: int) -> None:
        if isinstance(self.nodes, tuple):
            self.nodes = list(self.nodes)  # the tuple may be shared
        self.nodes.append(node)
        self.note = None


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

    def cut(self, begin: int, end: int, new: Entry | None) -> list[Entry]:
        """Remove and return what overlaps [begin, end), but for what sticks out; put `new` there."""
        first = last = bisect_left(self.begins, end)
        while first and self.entries[first - 1].end > begin:
            first -= 1
        found = self.entries[first:last]
        pieces = [] if new is None else [new]
        if found and found[0].begin < begin:
            pieces.insert(0, Entry(found[0].begin, begin, found[0].freeze(), found[0].note))
        if found and found[-1].end > end:
            pieces.append(Entry(end, found[-1].end, found[-1].freeze(), found[-1].note))
        if found or pieces:
            self.entries[first:last] = pieces
            self.begins[first:last] = [piece.begin for piece in pieces]
        return found


class IntervalLog:
    """Entries by interval. They are kept in tiers of disjoint ones, so that a look-up is a bisection a tier."""

    def __init__(self) -> None:
        self._tiers: list[Tier] = [Tier()]
        self.version = 0

    def add(self, begin: int, end: int, node: int, note: Any = None) -> None:
        """`node` touched [begin, end); `note` if nobody else touched exactly that."""
        self.version += 1
        home = None
        for tier in self._tiers:
            at = bisect_left(tier.begins, begin)
            if at < len(tier.begins) and tier.begins[at] == begin and tier.entries[at].end == end:
                tier.entries[at].add(node)
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
        tier.entries.insert(at, Entry(begin, end, (node,), note))

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        if len(self._tiers) == 1:
            return self._tiers[0].overlapping(begin, end)
        return [entry for tier in self._tiers for entry in tier.overlapping(begin, end)]

    def cut(self, begin: int, end: int, new: Entry | None = None) -> list[Entry]:
        """Forget and return what was known of [begin, end); `new`, if any, takes its place."""
        self.version += 1
        found = self._tiers[0].cut(begin, end, new)
        for tier in self._tiers[1:]:
            found += tier.cut(begin, end, None)
        return found
