"""Buffers that a vector lies in by turns, so that whoever writes it can leave an older one zero.

A vector that arrives (`regions.Buffer.lamport`) must be zero before it is written. Its readers cannot clear it, as none of
them knows when the others are done; a later writer can, if it writes elsewhere: the next one, or with `lag` 2 the one after
it, which even when it acts early is behind all that read the vector. The places of a vector's last `lag` + 1 writes are all
different, from one iteration to the next, too; with `spare` places more than that, a place is clear that many writes sooner.
"""

from __future__ import annotations

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region


class RotatingBuffers:
    """Where a vector of `cols` columns lies that an iteration writes `num_writes` times."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        cols: int,
        rows: int,
        num_writes: int,
        dtype: str = "bf16",
        lag: int = 1,
        spare: int = 0,
    ) -> None:
        self._lag, self._num_writes, self._written = lag, num_writes, 0
        self._num_places = lag + 1 + spare
        self._turns = num_writes - num_writes % self._num_places  # those behind them take places of their own
        # Written that seldom, a vector would have to be cleared where it is written.
        lamport = num_writes > lag
        count = self._num_places + num_writes % self._num_places if lamport else 1
        self.buffers = [
            graph.buffer(f"{name}{index}" if index else name, cols, rows=rows, dtype=dtype, lamport=lamport)
            for index in range(count)
        ]

    def turn(self) -> None:
        """The vector is written once more."""
        self._written += 1

    def _buffer(self, write: int) -> Buffer:
        if len(self.buffers) == 1:
            return self.buffers[0]
        write %= self._num_writes
        late = write - self._turns
        return self.buffers[self._num_places + late if late >= 0 else write % self._num_places]

    @property
    def buffer(self) -> Buffer:
        """Where it lies since the last turn."""
        return self._buffer(self._written - 1)

    def at(self, rank: int, begin: int = 0, end: int | None = None) -> Region:
        return self.buffer.at(rank, begin, end)

    def reset_at(self, rank: int, begin: int = 0, end: int | None = None) -> Region | None:
        """The same columns where it lay `lag` turns before; None where it always lies in the same place."""
        return self._buffer(self._written - 1 - self._lag).at(rank, begin, end) if len(self.buffers) > 1 else None
