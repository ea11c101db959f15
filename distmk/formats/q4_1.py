"""GGUF's Q4_1: code * d + m, in blocks of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.gguf_blocks import GgufBlocks, nibbles


class Q4_1(GgufBlocks):
    """Blocks of 20 bytes."""

    id = 17
    name = "q4_1"
    kind = "Q4_1"
    element_bits = 4
    group_cols = 32
    block_bytes = 20
    half_offsets = (0, 2)
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * K_TILE // group_cols * 4

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        return nibbles(blocks[:, :, 4:])

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [blocks[:, :, :2], blocks[:, :, 2:4]]
