"""Buffers that a vector lies in by turns, so that whoever writes it can leave the one before it zero.

A vector that arrives (`regions.Buffer.arriving`) must be zero before it is written. Its readers cannot clear it, as none of
them knows when the others are done; the next writer can, if it writes elsewhere. Two buffers are enough where a vector is
written an even number of times an iteration; else the last time takes a third, as it meets the next iteration's first.
"""

from __future__ import annotations

from distmk.graph import Graph
from distmk.regions import Buffer, Region


class Turns:
    """Where a bf16 vector of `cols` columns lies that an iteration writes `num_writes` times."""

    def __init__(self, graph: Graph, name: str, cols: int, rows: int, num_writes: int) -> None:
        count = 1 if num_writes == 1 else 2 + num_writes % 2  # written once, it would have to clear itself
        self.buffers = [
            graph.buffer(f"{name}{index}" if index else name, cols, rows=rows, dtype="bf16", arriving=count > 1)
            for index in range(count)
        ]
        self._num_writes = num_writes
        self._written = 0

    def turn(self) -> None:
        """The vector is written once more."""
        self._written += 1

    def _buffer(self, write: int) -> Buffer:
        write %= self._num_writes
        last_of_three = len(self.buffers) == 3 and write == self._num_writes - 1
        return self.buffers[2 if last_of_three else write % 2 if len(self.buffers) > 1 else 0]

    @property
    def buffer(self) -> Buffer:
        """Where it lies since the last turn."""
        return self._buffer(self._written - 1)

    def at(self, rank: int, begin: int = 0, end: int | None = None) -> Region:
        return self.buffer.at(rank, begin, end)

    def cleared_at(self, rank: int, begin: int = 0, end: int | None = None) -> Region | None:
        """The same columns where it lay before; None where it always lies in the same place."""
        return self._buffer(self._written - 2).at(rank, begin, end) if len(self.buffers) > 1 else None
