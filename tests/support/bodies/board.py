"""Many small tasks in one graph, each with memory of its own, run together in one launch and checked one by one.

Starting a backend takes longer than all of them, so they share a session, a launch and the workers' queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distmk import Graph, Session
from distmk.abi import Space
from distmk.formats import QuantizedRows
from distmk.formats.packed_tiles import PackedTiles
from distmk.formats.tiles import pack_rows
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Slab, Tiling, Weight, WeightKind
from distmk.program.program import Program, compile_graph
from distmk.testing.arrays import floats, to_bytes
from distmk.testing.launches import byte_cols, launch_twice
from distmk.testing.memory import Memory

Check = Callable[[Memory], None]
T = TypeVar("T")


class Expectation(NamedTuple):
    """`check` raises AssertionError if `rank` holds something else than it should after a task of rank `of`."""

    rank: int
    of: int
    kind: str
    what: str
    check: Check


class Result(NamedTuple):
    """One thing that was checked on `rank`; `error` is None where it is right."""

    rank: int
    of: int
    kind: str
    what: str
    error: str | None


@dataclass
class Board:
    """`graph` with the content of its buffers before the launch (poison unless given) and the expectations after it.

    Every rank builds the same board from the same seed, for all ranks.
    """

    rng: np.random.Generator
    num_ranks: int
    num_workers: int
    gpu_layout: bool  # matrices in tiles and caches swizzled, as the GPU's kernel takes them
    expectations: list[Expectation] = field(default_factory=list)
    pointers: list[tuple[Region, int, Region, int]] = field(default_factory=list)
    _given: dict[tuple[int, Buffer], list[tuple[slice, Any]]] = field(default_factory=dict)
    _writable: dict[tuple[int, Buffer], list[tuple[slice, slice]]] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.graph = Graph(self.num_ranks, self.num_workers)

    def name(self, what: str) -> str:
        self._count += 1
        return f"{what}{self._count}"

    def space(self) -> Space:
        return Space.HEAP if self.rng.random() < 0.5 else Space.LOCAL

    # Memory

    def buffer(
        self, cols: int, rows: int = 1, dtype: str = "f32", space: Space | None = None, lamport: bool = False
    ) -> Buffer:
        """A buffer on every rank, on the heap or not."""
        space = Space.HEAP if lamport else space or self.space()
        return self.graph.buffer(self.name("b"), cols, rows=rows, dtype=dtype, space=space, lamport=lamport)

    def padded(self, rank: int, cols: int, rows: int, space: Space | None = None, dtype: str = "f32") -> Region:
        """Columns of a new buffer that may have more of them on both sides."""
        before, after = (int(pad) for pad in self.rng.choice([0, 0, 1, 4, 7, 8], 2))
        buffer = self.buffer(before + cols + after, rows, dtype, space)
        return buffer.at(rank, before, before + cols)

    def fill(self, region: Region, data: npt.NDArray[Any] | torch.Tensor) -> Region:
        """Give the first rows of a region, as many as `data` has."""
        raw = to_bytes(data).reshape(-1, region.cols * ITEM_BYTES[region.buffer.dtype])
        self._given.setdefault((region.rank, region.buffer), []).append((byte_cols(region), raw))
        return region

    def filled(self, rank: int, data: Any, dtype: str, rows: int = 1, space: Space | None = None) -> Region:
        """A new buffer that holds `data` and nothing else."""
        raw = to_bytes(data)
        buffer = self.buffer(raw.size // rows // ITEM_BYTES[dtype], rows, dtype, space)
        self._given[(rank, buffer)] = [(slice(None), raw.reshape(rows, -1))]
        return buffer.at(rank)

    def writable(self, region: Region, num_rows: int = 1, first_row: int = 0) -> Region:
        """Declare that tasks may write some rows of a region."""
        spans = self._writable.setdefault((region.rank, region.buffer), [])
        spans.append((slice(first_row, first_row + num_rows), byte_cols(region)))
        return region

    def vector(self, rank: int, data: torch.Tensor | None) -> Slab | None:
        """f32 numbers that no task writes."""
        return None if data is None else self.graph.constant(self.name("v"), rank, data.numpy())

    def matrix(self, rank: int, weight: torch.Tensor, paired: bool = False) -> Slab:
        """A slab of bf16 weights: tiled for the GPU's kernel, else rows inside a larger matrix."""
        rows = to_bytes(weight).view(np.uint16).reshape(weight.shape)
        if self.gpu_layout:
            return self.graph.constant(self.name("w"), rank, pack_rows(rows, [len(rows)], paired))
        # `check` wants operands at multiples of 4 bytes: of odd rows, an even number comes before.
        before, after = (np.full((2 * int(n), rows.shape[1]), 0x7FC0, np.uint16) for n in self.rng.integers(0, 3, 2))
        slab = self.graph.constant(self.name("w"), rank, np.concatenate([before, rows, after]))
        return Slab(slab.weight, len(before), len(before) + len(rows))

    def packed_matrix(
        self,
        rank: int,
        found: type[PackedTiles],
        rows: QuantizedRows,
        lead: int,
        tail: int,
        paired: bool = False,
        slabs: tuple[tuple[int, int], ...] = (),
    ) -> Slab:
        """A matrix in packed tiles. `lead`, `tail`: columns of the rows that are not among those of the activations.

        slabs: rows of each; (): one slab.
        """
        num_rows, num_cols = len(rows.codes), found.num_cols(rows)
        slabs = slabs or ((0, num_rows),)
        packed = found.pack(rows, [end - begin for begin, end in slabs], paired)
        weight = Weight(
            self.name("w"),
            rank,
            num_rows,
            num_cols - lead - tail,
            WeightKind.DATA,
            data=packed,
            tiling=Tiling(slabs, paired),
            format=found,
            lead=lead,
            tail=tail,
        )
        self.graph.weights.append(weight)
        return Slab(weight, 0, num_rows)

    def table(self, rank: int, weight: torch.Tensor) -> Slab:
        """bf16 rows to look up, never in tiles."""
        return self.graph.constant(self.name("t"), rank, to_bytes(weight).view(np.uint16).reshape(weight.shape))

    # Running

    def expect(self, rank: int, kind: str, what: str, check: Check, of: int | None = None) -> None:
        """`check` the memory of `rank` after the launch, for a body of this kind that ran on rank `of` (None: on `rank`)."""
        self.expectations.append(Expectation(rank, rank if of is None else of, kind, what, check))

    def compile(self) -> Program:
        program = compile_graph(self.graph)
        vary_amounts(program, self.rng)
        for region, begin, target, offset in self.pointers:  # at a byte of a region: the operand of a byte of another
            ((_, raw),) = self._given[(region.rank, region.buffer)]
            address = np.array([program.placement.operand(target) + offset], np.uint64)
            raw.reshape(-1)[begin : begin + 8] = address.view(np.uint8)
        return program

    def run(self, session: Session) -> Iterator[Result]:
        """Launch twice from the same memory, check the first launch, and compare the second with it."""
        rank = session.bootstrap.rank
        given = {buffer: content for (of, buffer), content in self._given.items() if of == rank}
        launches = launch_twice(session, self.graph, self.rng, given)
        buffers = launches.buffers
        for each in self.expectations:
            if each.rank == rank:
                yield Result(rank, each.of, each.kind, each.what, _failure(each.check, buffers))
        writable = {buffer: spans for (of, buffer), spans in self._writable.items() if of == rank}
        for finding in launches.check(writable):
            yield Result(rank, rank, *finding)


def in_turn(rng: np.random.Generator, values: Sequence[T]) -> Iterator[T]:
    """`values` one after another without end, in a random order."""
    return itertools.cycle([values[index] for index in rng.permutation(len(values))])


def f32(memory: Memory, region: Region, num_rows: int = 1) -> npt.NDArray[np.float32]:
    """The first rows of a region, f32 or bf16, [num_rows, columns]."""
    return floats(np.ascontiguousarray(memory[region.buffer][:num_rows, byte_cols(region)]), region.buffer.dtype)


def _failure(check: Check, memory: Memory) -> str | None:
    try:
        check(memory)
    except AssertionError as error:
        return str(error)
    return None


def vary_amounts(program: Program, rng: np.random.Generator) -> None:
    """Triggers that add 1 to 3 instead of 1, and waits for as many times the count: alike on all ranks."""
    factors = [rng.integers(1, 4, part.header.num_events).tolist() for part in program.ranks]
    for rank, part in enumerate(program.ranks):
        for trigger in part.triggers:
            trigger.amount *= factors[trigger.rank][trigger.event]
        for wait in part.waits:
            wait.count *= factors[rank][wait.event]
