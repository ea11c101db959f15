"""A launch observed from outside: the memory it wrote, the events it fired, and whether a second launch does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.abi import Space
from distmk.engine.session import Session
from distmk.graph.graph import Graph
from distmk.graph.regions import ITEM_BYTES, Buffer, Region
from distmk.testing.arrays import Bytes
from distmk.testing.events import expected_counts, read_counts
from distmk.testing.memory import Memory, RankMemory

Images = dict[Space, Bytes]
Rows = tuple[slice, slice]  # rows and byte columns of a buffer


class Finding(NamedTuple):
    """The result of one check; `error` is None if nothing is wrong."""

    kind: str
    what: str
    error: str | None


@dataclass(frozen=True)
class Launches:
    """A rank's memory before a launch, after it, and after another launch from the same memory.

    counts: for every event of the first launch, the count and the expected count.
    """

    graph: Graph
    memory: RankMemory
    before: Images
    after: Images
    again: Images
    counts: list[tuple[int, int]]

    @property
    def buffers(self) -> Memory:
        """All buffers after the first launch."""
        return self.memory.buffers(self.after)

    def check(self, writable: dict[Buffer, list[Rows]]) -> Iterator[Finding]:
        """Check that tasks write and declare just `writable`, that a second launch does the same, and the events' counts."""
        may_write, accessed = self._writable_bytes(writable), self.memory.accessed()
        for space, extent in self.memory.extents.items():
            if not extent.whole.num_bytes:
                continue
            name = f"{space.name.lower()} memory of rank {self.memory.rank}"
            stray = (self.before[space] != self.after[space]) & ~may_write[space]
            yield Finding("other memory", name, self._first(extent.locate, stray, "written"))
            undeclared = may_write[space] & ~accessed[space]
            yield Finding("accesses", name, self._first(extent.locate, undeclared, "not in any access"))
            differing = self.after[space] != self.again[space]
            yield Finding("same bits again", name, self._first(extent.locate, differing, "different"))
        wrong = [f"event {i}: {got}, expected {want}" for i, (got, want) in enumerate(self.counts) if got != want]
        yield Finding("events", f"{len(self.counts)} events", "; ".join(wrong[:8]) or None)

    def _writable_bytes(self, writable: dict[Buffer, list[Rows]]) -> dict[Space, npt.NDArray[np.bool_]]:
        images = {space: np.zeros(extent.whole.num_bytes, np.uint8) for space, extent in self.memory.extents.items()}
        for buffer, content in self.memory.buffers(images).items():
            for rows, cols in writable.get(buffer, []):
                content[rows, cols] = 1
        return {space: image.astype(bool) for space, image in images.items()}

    def _first(self, locate: Callable[[int], tuple[Any, str]], wrong: npt.NDArray[np.bool_], how: str) -> str | None:
        """How many bytes are wrong, where the first one is, and which tasks write there; None if no byte is wrong."""
        where = np.flatnonzero(wrong)
        if not len(where):
            return None
        piece, place = locate(int(where[0]))
        name = piece.name if piece else ""
        writers = dict.fromkeys(task.op for task in self.graph.tasks for r in task.writes() if r.buffer.name == name)
        return f"{len(where)} bytes {how}, first {place}; written by {', '.join(writers) or 'nobody'}"


def launch_twice(
    session: Session,
    graph: Graph,
    rng: np.random.Generator,
    given: dict[Buffer, list[tuple[slice, Any]]],
    num_iterations: int = 1,
) -> Launches:
    """Launch twice from the same memory. Collective.

    `given`: for this rank's buffers, byte columns and the bytes [rows, columns] of their first rows. All other memory
    is poison, or zero in Lamport buffers.
    """
    memory = RankMemory(session.program, session.bootstrap.rank)
    before = memory.read(session)
    memory.poison(before, rng)
    for buffer, content in memory.buffers(before).items():
        for cols, raw in given.get(buffer, []):
            content[: len(raw), cols] = raw
    (after, counts), (again, _) = (_launch(session, memory, before, num_iterations) for _ in range(2))
    return Launches(graph, memory, before, after, again, counts)


def _launch(
    session: Session, memory: RankMemory, before: Images, num_iterations: int
) -> tuple[Images, list[tuple[int, int]]]:
    """The images after a launch from `before`; for every event, its count and the expected count."""
    memory.write(session, before)
    session.run(num_iterations)
    session.bootstrap.barrier()  # after it, the writes of other ranks have arrived
    after, counts = memory.read(session), read_counts(session)
    session.bootstrap.barrier()
    expected = expected_counts(session.program, session.bootstrap.rank, num_iterations)
    return after, list(zip(counts, expected, strict=True))


def byte_cols(region: Region) -> slice:
    """The bytes of a region in a row of its buffer."""
    item = ITEM_BYTES[region.buffer.dtype]
    return slice(region.begin * item, region.end * item)
