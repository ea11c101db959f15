"""Packed tiles: formats whose codes a GPU streams, and decodes as it multiplies (csrc/device/formats/packed_tile.cuh).

Tiles follow one another as those of bf16 do (`formats.tiles`): M blocks, K blocks, M tiles, K tiles. Columns are padded
to whole K tiles. A tile is the scales of 16 rows, then its rows, of which the last tile of a slab may have fewer. Behind
the tiles are the scales of rows, if the format has some.

In a row, lane t of four has the columns 32 j + 8 t to 32 j + 8 t + 7 for every j, as in tiles of bf16. Its words are
divided into units of 16 bytes: [unit][lane][16 bytes]. An even number of units is XOR-swizzled by the row's lowest bit,
so that eight lanes that load from two rows have no bank conflicts.

The scales of a tile are sections of some bytes a row: [8 rows g][row g, row g + 8][bytes], or of some bytes for each
lane of a row: [8 rows g][lane][row g, row g + 8][bytes].
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from distmk.abi import K_TILE, K_TILES_PER_BLOCK, M_TILE
from distmk.formats.arrays import as_indices, library, viewed, zeros
from distmk.formats.tiles import M_BLOCK, packed_order
from distmk.formats.weight_format import QuantizedRows, WeightFormat

LANES = 4  # lanes that share a row of a tile
UNIT_WORDS = 4
ROW_SCALE_BYTES = 4


class PackedTiles(WeightFormat):
    """A format with packed tiles, if `runs_on_gpu`. C++ has the same numbers as constants (csrc/abi.h).

    tiles_per_stage: tiles of one copy, side by side; a divisor of K_TILES_PER_BLOCK. The loader's stages have 18,432
      bytes.
    code_bits: of an element in the rows of a tile; None: `element_bits`. The others are in sections of the scales.
    tile_scale_bytes: scales of a tile, a multiple of 16.
    has_row_scales: every row has a float32 scale, which the epilogue multiplies its sums by.
    """

    tiles_per_stage: ClassVar[int]
    code_bits: ClassVar[int | None] = None
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
        tiles = num_rows * cls.tile_row_bytes() + num_m_tiles * cls.tile_scale_bytes
        return _num_k_tiles(num_cols) * tiles + (_row_scales_bytes(num_rows) if cls.has_row_scales else 0)

    @classmethod
    def tile_row_bytes(cls) -> int:
        return K_TILE * (cls.code_bits or cls.element_bits) // 8

    @classmethod
    @abstractmethod
    def rows_bytes(cls, num_rows: int, num_cols: int) -> int:
        """Bytes of rows as the host stores them."""

    @classmethod
    def num_cols(cls, rows: QuantizedRows) -> int:
        return int(rows.codes.shape[1])

    @classmethod
    def codes_of(cls, rows: QuantizedRows) -> Any:
        """One code a byte, [n, cols]."""
        return rows.codes

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        """The codes of whole K tiles [n, k tiles, 8, LANES, 8 columns], as int32 words [n, k tiles, LANES, words]."""
        raise NotImplementedError(f"{cls.name} has no tiles")

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[Any]:
        """The sections of a tile's scales, each [n, k tiles, LANES or 1, bytes of a row]. Groups behind the last have zeros."""
        return ()

    @classmethod
    def pack(cls, rows: QuantizedRows, slabs: Sequence[int], paired: bool) -> Any:
        """The bytes of consecutive slabs of `slabs` rows each, one after another; where the rows are.

        Slabs of as many rows are packed together, because on a GPU every operation takes some microseconds.
        """
        num_rows, num_cols = len(rows.codes), cls.num_cols(rows)
        num_k_tiles, codes = _num_k_tiles(num_cols), cls.codes_of(rows)
        if num_cols < num_k_tiles * K_TILE:
            padded = zeros((num_rows, num_k_tiles * K_TILE), "uint8", codes)
            padded[:, :num_cols] = codes
            codes = padded
        words = cls.lane_words(codes.reshape(num_rows, num_k_tiles, -1, LANES, 8))
        units = words.reshape(num_rows, num_k_tiles, LANES, -1, UNIT_WORDS).swapaxes(2, 3)
        sections = cls.scale_sections(rows, num_k_tiles)
        sizes = np.array(slabs)
        begins, packed = np.cumsum(sizes) - sizes, [None] * len(slabs)
        for size in set(slabs):
            alike = np.flatnonzero(sizes == size)
            order = begins[alike, None] + packed_order(size, paired)
            chosen = as_indices(order, words)
            streams = _packed_slabs(units[chosen], [section[chosen] for section in sections])
            if cls.has_row_scales:
                scales = zeros((len(alike), _row_scales_bytes(size) // ROW_SCALE_BYTES), "float32", rows.scales)
                scales[:, :size] = rows.scales[chosen, 0]
                streams = library(streams).concatenate([streams, viewed(scales, "uint8")], 1)
            for slab, stream in zip(alike, streams, strict=True):
                packed[slab] = stream
        return library(words).concatenate(packed)


def _num_k_tiles(num_cols: int) -> int:
    return -(-num_cols // K_TILE)


def _row_scales_bytes(num_rows: int) -> int:
    return -(-num_rows * ROW_SCALE_BYTES // 16) * 16


def _packed_slabs(units: Any, sections: Sequence[Any]) -> Any:
    """The tiles of slabs of as many rows, uint8 [slabs, bytes].

    units: [slabs, rows, k tiles, unit, LANES, UNIT_WORDS], rows in the order in which they are packed. They are swizzled
    in place. sections: [slabs, rows, k tiles, LANES or 1, bytes].
    """
    num_slabs, num_rows, num_k_tiles, num_units = units.shape[:4]
    if num_units % 2 == 0:
        swapped = [unit ^ 1 for unit in range(num_units)]
        units[:, 1::2] = units[:, 1::2][:, :, :, as_indices(swapped, units)]
    codes = viewed(units.reshape(num_slabs, num_rows, num_k_tiles, -1), "uint8")
    row_bytes, scale_bytes = codes.shape[3], M_TILE * sum(math.prod(section.shape[3:]) for section in sections)
    num_m_tiles = -(-num_rows // M_TILE)
    num_bytes = num_k_tiles * (num_rows * row_bytes + num_m_tiles * scale_bytes)
    out, at = zeros((num_slabs, num_bytes), "uint8", codes), 0
    for m in range(0, num_rows, M_BLOCK):
        for k in range(0, num_k_tiles, K_TILES_PER_BLOCK):
            in_block = slice(k, min(k + K_TILES_PER_BLOCK, num_k_tiles))
            m_end = min(m + M_BLOCK, num_rows)
            # The last tile of a slab may have fewer rows than the others of its block.
            for first, last in ((m, m_end - m_end % M_TILE), (m_end - m_end % M_TILE, m_end)):
                if first < last:
                    tiles = _tiles(codes[:, first:last, in_block], [part[:, first:last, in_block] for part in sections])
                    at = _append(out, at, tiles)
    return out


def _append(out: Any, at: int, tiles: Sequence[Any]) -> int:
    """Write the parts of tiles, each [slabs, M tiles, k tiles, ...], side by side to `out` from byte `at` on.

    Returns the byte behind them.
    """
    shape = tuple(int(size) for size in tiles[0].shape[:3])
    sizes = [math.prod(int(size) for size in part.shape[3:]) for part in tiles]
    end, begin = at + shape[1] * shape[2] * sum(sizes), 0
    place = out[:, at:end].reshape(*shape, sum(sizes))
    for part, size in zip(tiles, sizes, strict=True):
        place[..., begin : begin + size].reshape(part.shape)[:] = part
        begin += size
    return end


def _tiles(codes: Any, sections: Sequence[Any]) -> list[Any]:
    """Sections [slabs, M tiles, k tiles, M_TILE / 2, LANES or 1, 2, bytes] and codes [slabs, M tiles, k tiles, rows,
    bytes] of whole tiles, or of one tile with fewer rows, whose other rows have scales of zero.
    """
    num_slabs, num_rows, num_k_tiles, row_bytes = codes.shape
    tile_rows = min(num_rows, M_TILE)
    parts = []
    for section in sections:
        whole = section
        if tile_rows < M_TILE:
            whole = zeros((num_slabs, M_TILE, *section.shape[2:]), "uint8", section)
            whole[:, :num_rows] = section
        halves = whole.reshape(num_slabs, -1, 2, M_TILE // 2, *section.shape[2:])
        parts.append(halves.swapaxes(2, 4).swapaxes(4, 5))
    return [*parts, codes.reshape(num_slabs, -1, tile_rows, num_k_tiles, row_bytes).swapaxes(2, 3)]
