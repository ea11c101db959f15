"""Many small tasks in one graph, each with memory of its own, run together in one launch and checked one by one.

Starting a backend takes longer than all of them, so they share a session, a launch and the workers' queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.arrays import floats, poison, to_bytes

from distmk import Graph, Session
from distmk.abi import Space
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Slab
from distmk.weights.packing import pack

Memory = dict[Buffer, np.ndarray]  # this rank's bytes of every buffer
Check = Callable[[Memory], None]


@dataclass
class Board:
    """`graph` with the content of its buffers before the launch (poison unless given) and what to check afterwards.

    Every rank builds the same board from the same seed, for all ranks.
    """

    rng: np.random.Generator
    num_ranks: int
    num_workers: int
    tiled: bool  # matrices and caches as a GPU keeps them
    checks: list[tuple[int, str, Check]] = field(default_factory=list)
    _given: dict[tuple[int, Buffer], list[tuple[slice, Any]]] = field(default_factory=dict)
    _written: dict[tuple[int, Buffer], list[tuple[slice, slice]]] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.graph = Graph(self.num_ranks, self.num_workers)

    def name(self, what: str) -> str:
        self._count += 1
        return f"{what}{self._count}"

    def space(self) -> Space:
        return Space.HEAP if self.rng.random() < 0.5 else Space.LOCAL

    def buffer(
        self, cols: int, rows: int = 1, dtype: str = "f32", space: Space | None = None, lamport: bool = False
    ) -> Buffer:
        """A buffer on every rank, on the heap or not."""
        space = Space.HEAP if lamport else space or self.space()
        return self.graph.buffer(self.name("b"), cols, rows=rows, dtype=dtype, space=space, lamport=lamport)

    def wide(self, rank: int, cols: int, rows: int, space: Space | None = None, dtype: str = "f32") -> Region:
        """Columns of a buffer that may be wider on both sides."""
        before, after = (int(pad) for pad in self.rng.choice([0, 0, 1, 4, 7, 8], 2))
        buffer = self.buffer(before + cols + after, rows, dtype, space)
        return buffer.at(rank, before, before + cols)

    def give(self, region: Region, data: np.ndarray | torch.Tensor) -> Region:
        """What the region holds before the launch: its first rows."""
        raw = to_bytes(data).reshape(-1, region.cols * ITEM_BYTES[region.buffer.dtype])
        self._given.setdefault((region.rank, region.buffer), []).append((byte_cols(region), raw))
        return region

    def give_all(self, rank: int, data: Any, dtype: str, rows: int = 1, space: Space | None = None) -> Region:
        """A new buffer that holds `data` and nothing else."""
        raw = to_bytes(data)
        buffer = self.buffer(raw.size // rows // ITEM_BYTES[dtype], rows, dtype, space)
        self._given[(rank, buffer)] = [(slice(None), raw.reshape(rows, -1))]
        return buffer.at(rank)

    def vector(self, rank: int, data: torch.Tensor | None) -> Slab | None:
        """f32 numbers that no task writes."""
        return None if data is None else self.graph.constant(self.name("v"), rank, data.numpy())

    def matrix(self, rank: int, weight: torch.Tensor, paired: bool = False) -> Slab:
        """A slab of bf16 weights, in tiles where the backend wants them."""
        rows = to_bytes(weight).view(np.uint16).reshape(weight.shape)
        return self.graph.constant(self.name("w"), rank, pack(rows, [len(rows)], paired) if self.tiled else rows)

    def table(self, rank: int, weight: torch.Tensor) -> Slab:
        """bf16 rows to look up, never in tiles."""
        return self.graph.constant(self.name("t"), rank, to_bytes(weight).view(np.uint16).reshape(weight.shape))

    def written(self, region: Region, num_rows: int = 1) -> Region:
        """A task may write the first rows of this region."""
        spans = self._written.setdefault((region.rank, region.buffer), [])
        spans.append((slice(0, num_rows), byte_cols(region)))
        return region

    def check(self, rank: int, what: str, check: Check) -> None:
        """`check` raises AssertionError if `rank` holds something else than it should after the launch."""
        self.checks.append((rank, what, check))

    # On one rank

    def run(self, session: Session, rank: int) -> Iterator[tuple[str, str | None]]:
        """Run the launch twice on the same memory; yields (what, why it is wrong or None)."""
        before = self._initial(rank)
        results = []
        for _ in range(2):
            for buffer, image in before.items():
                session.backend.write(session.program.placement.buffers[buffer], 0, image)
            session.run(1)
            session.bootstrap.barrier()  # what other ranks put here has come
            results.append({buffer: session.view(buffer).view(np.uint8).copy() for buffer in before})
            session.bootstrap.barrier()
        after, again = results
        for of_rank, what, check in self.checks:
            if of_rank == rank:
                yield what, _failure(check, after)
        for buffer in before:
            writers = [task.op for task in self.graph.tasks if any(r.buffer is buffer for r in task.writes())]
            what = f"buffer {buffer.name} of {', '.join(writers) or 'nobody'}"
            if error := self._outside(rank, buffer, before[buffer], after[buffer]):
                yield what, error
            if not np.array_equal(after[buffer], again[buffer]):
                at = np.argwhere(after[buffer] != again[buffer])[0].tolist()
                yield what, f"a second launch left other bits, first at byte {at}"

    def _initial(self, rank: int) -> Memory:
        memory: Memory = {}
        for buffer in self.graph.buffers:
            image = poison(self.rng, -(-buffer.num_bytes // 2) * 2)[: buffer.num_bytes].copy()
            if buffer.lamport:
                image[:] = 0  # as a launch leaves it
            memory[buffer] = image.reshape(buffer.rows, buffer.row_bytes)
            for cols, raw in self._given.get((rank, buffer), []):
                memory[buffer][: len(raw), cols] = raw
        return memory

    def _outside(self, rank: int, buffer: Buffer, before: np.ndarray, after: np.ndarray) -> str | None:
        changed = before != after
        for rows, cols in self._written.get((rank, buffer), []):
            changed[rows, cols] = False
        where = np.argwhere(changed)
        if not len(where):
            return None
        return f"wrote outside its output: {len(where)} bytes, first at row {where[0][0]} byte {where[0][1]}"


def byte_cols(region: Region) -> slice:
    item = ITEM_BYTES[region.buffer.dtype]
    return slice(region.begin * item, region.end * item)


def f32(memory: Memory, region: Region, num_rows: int = 1) -> np.ndarray:
    """The first rows of a region, f32 or bf16, [num_rows, columns]."""
    return floats(np.ascontiguousarray(memory[region.buffer][:num_rows, byte_cols(region)]), region.buffer.dtype)


def _failure(check: Check, memory: Memory) -> str | None:
    try:
        check(memory)
    except AssertionError as error:
        return str(error)
    return None
