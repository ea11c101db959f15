"""Packed tiles: formats whose codes a GPU streams, and decodes as it multiplies (csrc/device/formats/packed_tile.cuh).

Tiles follow one another as those of bf16 do (`formats.tiles`): M blocks, K blocks, M tiles, K tiles. Columns are padded
to whole K tiles. A tile is the scales of 16 rows, then its rows, of which the last tile of a slab may have fewer. Behind
the tiles are the scales of rows, if the format has some.

In a row, lane t of four has the columns 32 j + 8 t to 32 j + 8 t + 7 for every j, as in tiles of bf16. Its words are
divided into units of 16 bytes: [unit][lane][16 bytes]. An even number of units is XOR-swizzled by the row's lowest bit,
so that eight lanes that load from two rows have no bank conflicts.

The scales of a tile are sections of some bytes a row: [8 rows g][row g, row g + 8][bytes].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from distmk.abi import K_TILE, K_TILES_PER_BLOCK, M_TILE, M_TILES_PER_BLOCK
from distmk.formats.arrays import as_indices, contiguous, library, viewed, zeros
from distmk.formats.tiles import packed_order
from distmk.formats.weight_format import QuantizedRows, WeightFormat

LANES = 4  # lanes that share a row of a tile
UNIT_WORDS = 4
ROW_SCALE_BYTES = 4


class PackedTiles(WeightFormat):
    """A format with packed tiles, if `runs_on_gpu`. C++ has the same numbers as constants (csrc/abi.h).

    tiles_per_stage: tiles of one copy, side by side; a divisor of K_TILES_PER_BLOCK. The loader's stages have 18,432
      bytes.
    tile_scale_bytes: scales of a tile, a multiple of 16.
    has_row_scales: every row has a float32 scale, which the epilogue multiplies its sums by.
    """

    tiles_per_stage: ClassVar[int]
    tile_scale_bytes: ClassVar[int] = 0
    has_row_scales: ClassVar[bool] = False

    @classmethod
    def pitch(cls, num_cols: int, tiled: bool) -> int:
        return _num_k_tiles(num_cols) * K_TILE if tiled else num_cols

    @classmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        if not tiled:
            return cls.rows_bytes(num_rows, num_cols)
        num_m_tiles = -(-num_rows // M_TILE)
        tiles = num_rows * K_TILE * cls.element_bits // 8 + num_m_tiles * cls.tile_scale_bytes
        return _num_k_tiles(num_cols) * tiles + (_row_scales_bytes(num_rows) if cls.has_row_scales else 0)

    @classmethod
    @abstractmethod
    def rows_bytes(cls, num_rows: int, num_cols: int) -> int:
        """Bytes of rows as the host stores them."""

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        """The codes of whole K tiles [n, k tiles, 8, LANES, 8 columns], as int32 words [n, k tiles, LANES, words]."""
        raise NotImplementedError(f"{cls.name} has no tiles")

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[Any]:
        """The sections of a tile's scales, each [n, k tiles, bytes of a row]. Groups behind the last have zeros."""
        return ()

    @classmethod
    def pack(cls, rows: QuantizedRows, slabs: Sequence[int], paired: bool) -> Any:
        """The bytes of consecutive slabs of `slabs` rows each, one after another; where the rows are."""
        num_rows, num_cols = rows.codes.shape
        num_k_tiles = _num_k_tiles(num_cols)
        codes = zeros((num_rows, num_k_tiles * K_TILE), "uint8", rows.codes)
        codes[:, :num_cols] = rows.codes
        words = cls.lane_words(codes.reshape(num_rows, num_k_tiles, -1, LANES, 8))
        units = words.reshape(num_rows, num_k_tiles, LANES, -1, UNIT_WORDS).swapaxes(2, 3)
        sections = cls.scale_sections(rows, num_k_tiles)
        packed, first = [], 0
        for slab in slabs:
            order = as_indices(first + packed_order(slab, paired), codes)
            packed.append(_packed_slab(units[order], [section[order] for section in sections]))
            if cls.has_row_scales:
                scales = zeros([_row_scales_bytes(slab) // ROW_SCALE_BYTES], "float32", rows.scales)
                scales[:slab] = rows.scales[order, 0]
                packed.append(viewed(scales, "uint8"))
            first += slab
        return library(codes).concatenate(packed)


def _num_k_tiles(num_cols: int) -> int:
    return -(-num_cols // K_TILE)


def _row_scales_bytes(num_rows: int) -> int:
    return -(-num_rows * ROW_SCALE_BYTES // 16) * 16


def _packed_slab(units: Any, sections: Sequence[Any]) -> Any:
    """The tiles of a slab. units: [rows, k tiles, unit, LANES, UNIT_WORDS], rows in the order in which they are packed."""
    num_rows, num_k_tiles, num_units = units.shape[:3]
    if num_units % 2 == 0:
        swapped = [unit ^ 1 for unit in range(num_units)]
        units[1::2] = units[1::2][:, :, as_indices(swapped, units)]
    num_m_tiles = -(-num_rows // M_TILE)
    codes = _whole_tiles(viewed(units.reshape(num_rows, num_k_tiles, -1), "uint8"), num_m_tiles)
    parts = [_whole_tiles(section, num_m_tiles) for section in sections]
    tiles = [_section(part) for part in parts]
    row_bytes = codes.shape[3]
    tiles.append(codes.swapaxes(1, 2).reshape(num_m_tiles, num_k_tiles, -1))
    whole = library(codes).concatenate(tiles, 2)
    missing = (num_m_tiles * M_TILE - num_rows) * row_bytes  # of the last tile
    stream: list[Any] = []
    for m in range(0, num_m_tiles, M_TILES_PER_BLOCK):
        for k in range(0, num_k_tiles, K_TILES_PER_BLOCK):
            block = whole[m : m + M_TILES_PER_BLOCK, k : k + K_TILES_PER_BLOCK]
            if missing and m + M_TILES_PER_BLOCK >= num_m_tiles:
                stream += [block[:-1].reshape(-1), block[-1, :, :-missing].reshape(-1)]
            else:
                stream.append(block.reshape(-1))
    return library(codes).concatenate(stream)


def _whole_tiles(rows: Any, num_m_tiles: int) -> Any:
    """Bytes [rows, k tiles, n], with rows of zeros behind them, as [M tiles, M_TILE, k tiles, n]."""
    padded = zeros((num_m_tiles * M_TILE, *rows.shape[1:]), "uint8", rows)
    padded[: len(rows)] = rows
    return padded.reshape(num_m_tiles, M_TILE, *rows.shape[1:])


def _section(rows: Any) -> Any:
    """[M tiles, M_TILE, k tiles, n] as [M tiles, k tiles, bytes]: rows g and g + 8 side by side."""
    num_m_tiles, _, num_k_tiles, _ = rows.shape
    halves = rows.reshape(num_m_tiles, 2, M_TILE // 2, num_k_tiles, -1)
    return contiguous(halves.swapaxes(1, 3)).reshape(num_m_tiles, num_k_tiles, -1)
