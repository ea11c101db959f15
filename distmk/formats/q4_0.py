"""GGUF's Q4_0: (code - 8) * d, in blocks of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.gguf_blocks import GgufBlocks, nibbles


class Q4_0(GgufBlocks):
    """Blocks of 18 bytes."""

    id = 16
    name = "q4_0"
    kind = "Q4_0"
    element_bits = 4
    group_cols = 32
    block_bytes = 18
    half_offsets = (0,)
    runs_on_gpu = True
    tiles_per_stage = 8
    tile_scale_bytes = M_TILE * K_TILE // group_cols * 2

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        return nibbles(blocks[:, :, 2:])

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [blocks[:, :, :2]]
