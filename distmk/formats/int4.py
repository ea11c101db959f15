"""Integers of 4 bits in groups of 128 columns.

Files with larger groups repeat their scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distmk.abi import K_TILE, M_TILE
from distmk.formats.int4_groups import Int4Groups
from distmk.formats.packed_tiles import U32
from distmk.formats.weight_format import U8, QuantizedRows


class Int4(Int4Groups):
    """Scales and zero points are [rows, columns / 128].

    In tiles, scales are float16 numbers; other scales are rounded. A word has the codes of eight columns: half byte i of
    the low half has column 2 i, of the high half column 2 i + 1.
    """

    id = 3
    name = "int4"
    group_cols = 128
    quantizes = True
    runs_on_gpu = True
    tiles_per_stage = 8
    tile_scale_bytes = M_TILE * K_TILE // group_cols * 3

    @classmethod
    def lane_words(cls, codes: U8) -> U32:
        shifts = np.array([4 * (col // 2) + 16 * (col % 2) for col in range(8)], np.uint32)
        words = (codes.astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
        return np.ascontiguousarray(words.swapaxes(2, 3))

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[U8]:
        shape = len(rows.scales), num_k_tiles * K_TILE // cls.group_cols
        scales, zeros = np.zeros(shape, np.float16), np.zeros(shape, np.uint8)
        scales[:, : rows.scales.shape[1]] = rows.scales
        zeros[:, : rows.zeros.shape[1]] = rows.zeros
        return [part.reshape(len(part), num_k_tiles, -1).view(np.uint8) for part in (scales, zeros)]
