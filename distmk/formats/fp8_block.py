"""FP8 E4M3 with a scale per block of 128 x 128 elements (DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437; Qwen3-*-FP8).

Every row has the scales of its blocks, because the rows of a tile may belong to several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.arrays import viewed, zeros
from distmk.formats.e4m3 import E4m3
from distmk.formats.weight_format import QuantizedRows


class Fp8Block(E4m3):
    """Scales are [rows, columns / 128]."""

    id = 2
    name = "fp8_block"
    group_cols = 128
    tile_scale_bytes = M_TILE * K_TILE // group_cols * 4

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[Any]:
        scales = zeros((len(rows.scales), num_k_tiles * K_TILE // cls.group_cols), "float32", rows.scales)
        scales[:, : rows.scales.shape[1]] = rows.scales
        return [viewed(scales.reshape(len(scales), num_k_tiles, 1, -1), "uint8")]
