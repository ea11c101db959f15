"""A weight format: how the elements of a matrix are stored, on the host in rows and on a GPU in tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from distmk.formats.tiles import padded_cols
from distmk.model.bf16 import F32


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
    folds_factors: a factor of each column, such as the weight of the preceding norm, can be multiplied into the matrix.
      If it cannot, the task that writes the activations multiplies them by it.
    runs_on_gpu: the kernel can multiply its tiles. Other formats are for the host alone and have no tiles.
    """

    id: ClassVar[int]
    name: ClassVar[str]
    element_bits: ClassVar[int]
    copy_align_bytes: ClassVar[int] = 16
    folds_factors: ClassVar[bool]
    runs_on_gpu: ClassVar[bool] = False

    @classmethod
    def pitch(cls, num_cols: int, tiled: bool) -> int:
        """The number of elements that a row takes. Tiles are padded to whole groups of columns."""
        return padded_cols(num_cols) if tiled else num_cols

    @classmethod
    @abstractmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        """Bytes of a slab, with its scales. Without tiles every row takes the same number of bytes."""

    @classmethod
    @abstractmethod
    def encode(cls, rows: Any) -> Any:
        """The stored form of bf16 rows [n, cols] of a checkpoint, without tiles: an array of `slab_bytes` bytes.

        `rows` is a numpy array of uint16 or, if the format runs on GPUs, a torch tensor of int16.
        """

    @classmethod
    def pack(cls, rows: Any, slabs: Sequence[int], paired: bool) -> Any:
        """Tiles of bf16 rows [n, cols]. The rows are consecutive slabs of `slabs` rows each; see `tiles.pack_rows`."""
        raise NotImplementedError(f"{cls.name} has no tiles")

    @classmethod
    @abstractmethod
    def values(cls, stored: Any) -> F32:
        """The values of rows that `encode` returned, float32 [rows, cols], exactly: the oracle of the decoders in C++."""
