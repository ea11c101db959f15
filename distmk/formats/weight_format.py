"""A weight format: how the elements of a matrix are stored, on the host in rows and on a GPU in tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from distmk.abi import WeightFormatId
from distmk.formats.tiles import padded_cols
from distmk.model.bf16 import F32


class WeightFormat(ABC):
    """How a matrix [rows, cols] lies in memory. No other module knows how many bytes an element takes, or their order in a tile.

    A matrix is stored in slabs, one a task: ranges of rows that follow one another. Without tiles a row follows the row before
    it. With tiles (`formats.tiles`) a slab is the stream of bytes that a GPU's loader copies, a stage at a time; a format may
    put scales behind the tiles of each stage, so that one copy brings both.

    id: of the format in saved programs. name: what users call it; C++ has the constants below as `<Name>Format` (csrc/abi.h).
    element_bits: bits of an element, without scales.
    copy_align_bytes: a slab, and every part of it that a loader copies at once, begins at a multiple of this.
    folds_factors: a factor of each column, such as the weight of the norm in front, can be multiplied into the matrix. Where it
        cannot, whoever writes the activations multiplies them.
    """

    id: ClassVar[WeightFormatId]
    name: ClassVar[str]
    element_bits: ClassVar[int]
    copy_align_bytes: ClassVar[int] = 16
    folds_factors: ClassVar[bool]

    @classmethod
    def pitch(cls, num_cols: int, tiled: bool) -> int:
        """Elements that a row takes: tiles are padded to whole groups of columns."""
        return padded_cols(num_cols) if tiled else num_cols

    @classmethod
    @abstractmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        """Bytes of a slab, with its scales."""

    @classmethod
    @abstractmethod
    def pack(cls, rows: Any, slabs: Sequence[int], paired: bool) -> Any:
        """Tiles of the elements `rows` [n, cols], which are consecutive slabs of `slabs` rows each; see `tiles.pack_rows`."""

    @classmethod
    @abstractmethod
    def values(cls, stored: Any) -> F32:
        """What rows that are stored without tiles stand for, float32 [rows, cols]; the oracle of the decodes in C++."""
