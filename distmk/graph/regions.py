"""The operands of tasks: buffers, regions of buffers, weights, and slabs of weights.

A buffer is [rows, cols] elements; a region is a range of its columns over all rows. An activation buffer has one row for each
token of the iteration, so two tasks of an iteration conflict exactly where their column ranges overlap.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.abi import Space
from distmk.errors import UsageError
from distmk.formats import Bf16, WeightFormat

ITEM_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "u8": 1}


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of the same shape on every rank: on the symmetric heap, which peers may write, or in each rank's own arena.

    lamport: a Lamport buffer, which is on the heap and zero when a launch begins. A writer publishes elements that are
    not zero (a zero as negative zero). Readers poll until an element is not zero. Some task resets it to zero before it
    is published again.
    """

    name: str
    rows: int
    cols: int
    dtype: str = "f32"
    space: Space = Space.HEAP
    lamport: bool = False

    @property
    def row_bytes(self) -> int:
        return self.cols * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def at(self, rank: int, begin: int = 0, end: int | None = None) -> Region:
        """Columns [begin, end) on `rank`; raises UsageError if they are not inside the buffer."""
        try:
            begin, end = index(begin), self.cols if end is None else index(end)
        except TypeError:
            raise UsageError(
                f"region [{begin}, {end}) of buffer {self.name}: columns are whole numbers (// divides to one)"
            ) from None
        if not 0 <= begin < end <= self.cols:
            raise UsageError(f"region [{begin}, {end}) is not inside buffer {self.name} of {self.cols} columns")
        return Region(self, rank, begin, end)


class Region(NamedTuple):
    """Columns [begin, end) of a buffer on one rank, over all its rows."""

    buffer: Buffer
    rank: int
    begin: int
    end: int

    @property
    def cols(self) -> int:
        return self.end - self.begin

    def on(self, rank: int) -> Region:
        """The same columns on another rank."""
        return Region(self.buffer, rank, self.begin, self.end)

    def __str__(self) -> str:
        return f"{self.buffer.name}[{self.begin}:{self.end}]@{self.rank}"


class WeightKind(enum.Enum):
    """The contents of a weight."""

    MATRIX = "matrix"  # rows taken from checkpoint tensors, in the format of the weight
    VECTOR = "vector"  # f32 [elements, 1] taken from checkpoint tensors
    ORDER = "order"  # i32 [elements, 1]: the order in which a checkpoint matrix stores its columns
    ROPE = "rope"  # f32 [positions, head_dim]: cos then sin of each angle
    DATA = "data"  # an array given by the caller


@dataclass(frozen=True)
class Segment:
    """Rows [row_begin, row_end) of a checkpoint tensor (elements, for a vector)."""

    tensor: str
    row_begin: int
    row_end: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row_begin


@dataclass(frozen=True)
class Tiling:
    """The packing of a matrix that a GPU streams: each slab, which is a range of rows, is packed in tiles by itself.

    paired: row i of the first half of a slab is packed with row i of the second half (gate and up).
    """

    slabs: tuple[tuple[int, int], ...]
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Weight:
    """Read-only memory of one rank: columns [col_begin, col_begin + cols) of the checkpoint rows `segments`, in order,
    or `data`.

    format: of a matrix.
    lead, tail: columns that are stored before and after those, because a row is stored in whole groups of its format.
    tiling: how a matrix is packed in tiles; None: rows one after another.
    col_scale: a checkpoint vector that every row is multiplied by, column by column.
    offset: added to the elements of col_scale or, if the weight is a vector, to its own elements.
    scale: a factor of all elements.

    A matrix is rounded to its format once, after its elements have been multiplied in float32.
    """

    name: str
    rank: int
    rows: int
    cols: int
    kind: WeightKind = WeightKind.MATRIX
    segments: tuple[Segment, ...] = ()
    col_begin: int = 0
    data: npt.NDArray[np.generic] | None = field(default=None, repr=False)
    tiling: Tiling | None = None
    col_scale: str | None = None
    offset: float = 0.0
    scale: float = 1.0
    format: type[WeightFormat] = Bf16
    lead: int = 0
    tail: int = 0

    @property
    def stored_cols(self) -> int:
        """The number of columns that are stored."""
        return self.lead + self.cols + self.tail

    @property
    def pitch(self) -> int:
        """The number of elements that a row of a matrix takes."""
        return self.format.pitch(self.stored_cols, self.tiling is not None)

    def bytes_of(self, num_rows: int) -> int:
        """Bytes of `num_rows` rows. They are a slab, or the weight has no tiles."""
        if self.tiling or self.kind is WeightKind.MATRIX:
            return self.format.slab_bytes(num_rows, self.stored_cols, self.tiling is not None)
        item_bytes = ITEM_BYTES["f32"] if self.data is None else int(self.data.dtype.itemsize)
        return num_rows * self.cols * item_bytes

    def offset_of(self, row: int) -> int:
        """The byte at which `row` begins. In tiles, `row` must be the first row of a slab."""
        return self._slab_offsets[row] if self.tiling else self.bytes_of(row)

    @property
    def num_bytes(self) -> int:
        return self.offset_of(self.rows)

    @property
    def extent(self) -> tuple[int, int]:
        """The weight's memory as rows and bytes per row. If slabs have more bytes than their rows, it counts as one row."""
        row_bytes = self.bytes_of(1)
        return (self.rows, row_bytes) if self.num_bytes == self.rows * row_bytes else (1, self.num_bytes)

    @cached_property
    def _slab_offsets(self) -> dict[int, int]:
        """The byte offset of each slab by its first row, and of the end by the number of rows."""
        assert self.tiling
        sizes = (self.bytes_of(end - begin) for begin, end in self.tiling.slabs)
        begins = (*(begin for begin, _ in self.tiling.slabs), self.rows)
        return dict(zip(begins, accumulate(sizes, initial=0), strict=True))


class Slab(NamedTuple):
    """Rows [row_begin, row_end) of a weight: the part that one task streams."""

    weight: Weight
    row_begin: int
    row_end: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row_begin

    @property
    def num_bytes(self) -> int:
        return self.weight.offset_of(self.row_end) - self.weight.offset_of(self.row_begin)
