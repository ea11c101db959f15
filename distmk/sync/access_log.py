"""Who last wrote and who has since read each part of a buffer on a rank, and so what a task that touches it comes after."""

from __future__ import annotations

from bisect import bisect_left

from distmk.sync.happens_before import NO_PLACE, Dependency, History
from distmk.sync.interval_map import Group, IntervalLog


class Cell:
    """[begin, end) as `writer` left it, and who has read exactly that."""

    __slots__ = ("begin", "end", "readers", "writer")

    def __init__(self, begin: int, end: int, writer: Dependency, readers: Group | None = None) -> None:
        self.begin, self.end, self.writer, self.readers = begin, end, writer, readers

    def piece(self, begin: int, end: int) -> Cell:
        if self.readers is not None:
            self.readers.shared = True
        return Cell(begin, end, self.writer, self.readers)


class Footprint:
    """What tasks did to a buffer on `rank`. Most read what one task wrote or write where one did: they meet in a cell."""

    __slots__ = ("_begins", "_cells", "_history", "_readers", "_unions", "rank")

    def __init__(self, rank: int, history: History) -> None:
        self.rank = rank
        self._history = history
        self._cells: list[Cell] = []  # disjoint, in order
        self._begins: list[int] = []
        self._readers: IntervalLog | None = None  # of anything but one cell
        self._unions: dict[tuple[int, int], Dependency] = {}  # all writers of an interval, until anything is written

    def read(self, begin: int, end: int, reading: Group) -> Dependency | None:
        """Who wrote any of [begin, end), which a task (alone in the group `reading`) reads now."""
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin and self._cells[at].end == end:
            cell = self._cells[at]
            cell.readers = cell.readers.plus(reading) if cell.readers else reading
            return cell.writer
        if self._readers is None:
            self._readers = IntervalLog()
        self._readers.add(begin, end, reading)
        return self._unions.get((begin, end)) or self._writers(begin, end)

    def write(self, begin: int, end: int, node: int) -> list[Dependency]:
        """Who wrote or read any of [begin, end) before `node` writes it now."""
        written = self._history.single(node, self.rank)
        if self._unions:
            self._unions.clear()
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin and self._cells[at].end == end:
            cell = self._cells[at]
            cells = [Cell(begin, end, cell.writer, cell.readers)]
            cell.writer, cell.readers = written, None
        else:
            cells = self._replace(begin, end, written)
        # Who comes after a reader of a cell comes after what it read.
        found = [cell.writer for cell in cells if cell.readers is None and cell.writer.latest != node]
        readers = [cell.readers for cell in cells if cell.readers is not None]
        if self._readers is not None:
            readers += [entry.group for entry in self._readers.cut(begin, end)]
        for group in readers:
            if group.nodes[-1] != node:
                found.append(self._dependency(group))
            elif others := set(group.nodes) - {node}:  # a task is after itself
                found.append(self._history.dependency(others, NO_PLACE))
        return found

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        first = last = bisect_left(self._begins, end)
        while first and self._cells[first - 1].end > begin:
            first -= 1
        return first, last

    def _writers(self, begin: int, end: int) -> Dependency | None:
        first, last = self._span(begin, end)
        if last - first <= 1:
            return self._cells[first].writer if last > first else None
        nodes = {cell.writer.latest for cell in self._cells[first:last]}
        made = self._unions[(begin, end)] = self._history.dependency(nodes, self.rank)
        return made

    def _replace(self, begin: int, end: int, written: Dependency) -> list[Cell]:
        first, last = self._span(begin, end)
        cells = self._cells[first:last]
        pieces = [Cell(begin, end, written)]
        if cells and cells[0].begin < begin:
            pieces.insert(0, cells[0].piece(cells[0].begin, begin))
        if cells and cells[-1].end > end:
            pieces.append(cells[-1].piece(end, cells[-1].end))
        self._cells[first:last] = pieces
        self._begins[first:last] = [piece.begin for piece in pieces]
        return cells

    def _dependency(self, readers: Group) -> Dependency:
        if readers.note is None:
            readers.note = self._history.dependency(readers.nodes, NO_PLACE)
        known: Dependency = readers.note
        return known
