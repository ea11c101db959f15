"""Integers of 4 bits in groups of 128 columns.

Files with larger groups repeat their scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.arrays import viewed, zeros
from distmk.formats.int4_groups import Int4Groups
from distmk.formats.lane_words import packed_pairs
from distmk.formats.weight_format import QuantizedRows


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
    def lane_words(cls, codes: Any) -> Any:
        return packed_pairs(codes, 4)

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[Any]:
        sections = []
        for given, dtype in ((rows.scales, "float16"), (rows.zeros, "uint8")):
            whole = zeros((len(given), num_k_tiles * K_TILE // cls.group_cols), dtype, given)
            whole[:, : given.shape[1]] = given
            sections.append(viewed(whole.reshape(len(whole), num_k_tiles, 1, -1), "uint8"))
        return sections
