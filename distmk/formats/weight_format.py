"""A weight format: how the elements of a matrix are stored, on the host in rows and on a GPU in tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.formats.tiles import padded_cols
from distmk.model.bf16 import F32, U16

U8 = npt.NDArray[np.uint8]

HOST_GROUP = 32
"""Columns that the host decodes at a time. Rows of codes are padded to a multiple of it."""


def padded_codes(codes: U8) -> U8:
    """Codes [rows, cols], and zeros behind each row: [rows, cols rounded up to a multiple of HOST_GROUP]."""
    padded = np.zeros((len(codes), padded_to_host_groups(codes.shape[1])), np.uint8)
    padded[:, : codes.shape[1]] = codes
    return padded


def padded_to_host_groups(num_cols: int) -> int:
    """The columns of a row of codes on the host."""
    return -(-num_cols // HOST_GROUP) * HOST_GROUP


class QuantizedRows(NamedTuple):
    """Whole groups of some rows of a matrix, as files store them and as formats pack them, on the host and on GPUs.

    codes: uint8 [rows, n]: one code a byte, or the blocks of a GGUF file, whose scales are among their bytes.
    scales: float32 [rows, groups]; no groups if the scales are among the codes.
    zeros: uint8 [rows, groups], the code of zero; no groups if the format has none.
    """

    codes: U8
    scales: F32
    zeros: U8

    @staticmethod
    def of_blocks(blocks: U8) -> QuantizedRows:
        """Rows whose scales are among their codes."""
        return QuantizedRows(blocks, np.empty((len(blocks), 0), np.float32), np.empty((len(blocks), 0), np.uint8))


class WeightFormat(ABC):
    """How a matrix [rows, cols] is stored.

    No other module knows how many bytes an element takes, or the order of bytes in a tile.

    A matrix is stored in slabs, one for each task: ranges of consecutive rows. Without tiles, rows follow one another.
    With tiles (`formats.tiles`) a slab is the stream of bytes that a GPU's loader copies, one stage at a time. A format
    may put scales behind the tiles of each stage, so that one copy brings both.

    id: its number in arguments of tasks and in saved programs.
    name: the name that users give, and the name of its module. C++ has the constants of a class `Name` as `NameFormat`
      (csrc/abi.h), and the class that decodes its rows on the host as `NameRows`, in the header of the module's name in
      csrc/host/formats.
    element_bits: bits of an element, without scales.
    copy_align_bytes: a slab, and every part of it that a loader copies at once, begins at a multiple of this.
    group_cols: columns of a row that share a scale, beginning at a multiple of their number. A rank stores whole groups
      even if its shard begins or ends inside of one (`Weight.lead`, `Weight.tail`).
    is_quantized: rows are `QuantizedRows`. Otherwise they are bfloat16 bits.
    is_ordered: columns are stored in an order of their own, which each matrix has (`Checkpoint.read_order`). Shards have
      all columns.
    quantizes: `quantize` makes such rows of bfloat16 ones, so the format can be asked for by its name (`quantization`).
    folds_factors: a factor of each column, such as the weight of the preceding norm, can be multiplied into the matrix.
      If it cannot, the task that writes the activations multiplies them by it.
    runs_on_gpu: the kernel can multiply its tiles. Other formats are for the host alone and have no tiles.
    may_be_bf16: where the kernel cannot, stored matrices become bf16. Otherwise GPUs refuse the model.
    """

    id: ClassVar[int]
    name: ClassVar[str]
    element_bits: ClassVar[int]
    copy_align_bytes: ClassVar[int] = 16
    group_cols: ClassVar[int] = 1
    is_quantized: ClassVar[bool] = True
    is_ordered: ClassVar[bool] = False
    quantizes: ClassVar[bool] = False
    folds_factors: ClassVar[bool] = False
    runs_on_gpu: ClassVar[bool] = False
    may_be_bf16: ClassVar[bool] = False

    @classmethod
    def pitch(cls, num_cols: int, tiled: bool) -> int:
        """The number of elements that a row takes. Tiles are padded to whole groups of columns."""
        return padded_cols(num_cols) if tiled else num_cols

    @classmethod
    def whole_groups(cls, begin: int, end: int, num_cols: int) -> tuple[int, int]:
        """The columns [begin, end) of a matrix of `num_cols` columns, and the others of their groups."""
        return begin // cls.group_cols * cls.group_cols, min(-(-end // cls.group_cols) * cls.group_cols, num_cols)

    @classmethod
    def takes(cls, num_cols: int) -> bool:
        """Whether a row can have so many columns."""
        return True

    @classmethod
    @abstractmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        """Bytes of a slab, with its scales. Without tiles every row takes the same number of bytes."""

    @classmethod
    def quantize(cls, rows: U16) -> QuantizedRows:
        """bfloat16 rows [n, cols] in this format. A row's codes do not depend on other rows."""
        raise NotImplementedError(f"{cls.name} does not quantize")

    @classmethod
    def cut(cls, rows: QuantizedRows, begin: int, end: int) -> QuantizedRows:
        """Columns [begin, end) of whole rows. They are whole groups."""
        groups = slice(begin // cls.group_cols, -(-end // cls.group_cols))
        return QuantizedRows(rows.codes[:, begin:end], rows.scales[:, groups], rows.zeros[:, groups])

    @classmethod
    def values(cls, rows: QuantizedRows) -> F32:
        """The values of rows, float32 [rows, cols]: exactly, or rounded once."""
        raise NotImplementedError(f"{cls.name} has no codes")

    @classmethod
    def pack_rows(cls, rows: QuantizedRows) -> U8:
        """The rows as the host stores them: uint8 [rows, bytes of a row], each with its scales."""
        raise NotImplementedError(f"{cls.name} has no codes")

    @classmethod
    def pack(cls, rows: Any, slabs: Sequence[int], paired: bool) -> Any:
        """Tiles of bf16 rows [n, cols]. The rows are consecutive slabs of `slabs` rows each; see `tiles.pack_rows`."""
        raise NotImplementedError(f"{cls.name} has no tiles")
