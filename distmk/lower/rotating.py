"""Rotating Lamport buffers: each write of a vector goes to another buffer than the writes shortly before it.

A Lamport buffer (`regions.Buffer.lamport`) must be zero before it is written, because its readers poll for elements
that are not zero. No reader can reset it, because none knows when the other readers are done. A later writer can: write
w of a vector goes to its own buffer and resets the buffer of write w - lag. A lag of 1 is enough if write w comes after
all readers of write w - 1. A lag of 2 also covers a writer that starts before its waits are met: it comes after all
readers of write w - 2.

Every iteration writes the same buffers, so a write is named by its index in the iteration. `Rotation` is the
arithmetic, `RotatingBuffers` the buffers; neither has state. Source: the one-shot Lamport all-reduce of TensorRT-LLM
and FlashInfer, which rotates three buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region


@dataclass(frozen=True)
class Rotation:
    """Buffer indices of a vector that an iteration writes `num_writes` times; write w resets the buffer of write w - `lag`.

    Any `lag` + 1 successive writes go to distinct buffers, also across the end of an iteration. `spare` more buffers
    take part, so that a buffer is zero that many writes before it is written again.
    """

    num_writes: int
    lag: int = 1
    spare: int = 0

    @property
    def rotates(self) -> bool:
        """Whether there are several buffers.

        If an iteration has at most `lag` writes, a write would have to reset the buffer that it fills. One buffer then
        serves all writes, without polling.
        """
        return self.num_writes > self.lag

    @property
    def period(self) -> int:
        """The number of buffers that successive writes cycle through."""
        return self.lag + 1 + self.spare

    @property
    def num_buffers(self) -> int:
        """The buffers of the period, and one more for each write of an iteration after its last whole period."""
        return self.period + self.num_writes % self.period if self.rotates else 1

    def index_at(self, write: int) -> int:
        """The buffer of a write. Writes of the previous iteration have negative indices; those of the next one begin at
        `num_writes`.
        """
        if not self.rotates:
            return 0
        write %= self.num_writes
        num_whole = self.num_writes - self.num_writes % self.period
        return write % self.period if write < num_whole else self.period + write - num_whole


@dataclass(frozen=True)
class RotatingBuffers:
    """The buffers of a rotation, [rows, cols] each."""

    rotation: Rotation
    buffers: tuple[Buffer, ...]

    @staticmethod
    def declare(
        graph: Graph, name: str, cols: int, rotation: Rotation, *, rows: int, dtype: str = "bf16"
    ) -> RotatingBuffers:
        """Add the buffers `name`, `name`1, `name`2, ... to `graph`: Lamport buffers if they rotate."""
        return RotatingBuffers(
            rotation,
            tuple(
                graph.buffer(f"{name}{i}" if i else name, cols, rows=rows, dtype=dtype, lamport=rotation.rotates)
                for i in range(rotation.num_buffers)
            ),
        )

    def at(self, write: int) -> Buffer:
        """The buffer of write `write` of an iteration."""
        return self.buffers[self.rotation.index_at(write)]

    def reset_at(self, write: int, rank: int, begin: int = 0, end: int | None = None) -> Region | None:
        """The columns that write `write` resets when it writes [begin, end); None if the buffers do not rotate."""
        if not self.rotation.rotates:
            return None
        return self.at(write - self.rotation.lag).at(rank, begin, end)
