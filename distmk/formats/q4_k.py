"""GGUF's Q4_K: code * (d * scale) - dmin * min, in blocks of 256 columns with 8 scales and minima of 6 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import M_TILE
from distmk.formats.gguf_blocks import GgufBlocks, nibbles, six_bit_scales


class Q4_K(GgufBlocks):
    """Blocks of 144 bytes. In tiles they take 148, because a scale or minimum of six bits takes a byte; values are the same."""

    id = 21
    name = "q4_k"
    kind = "Q4_K"
    element_bits = 4
    group_cols = 256
    block_bytes = 144
    half_offsets = (0, 2)
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * 20

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        return nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))  # of 64 columns each

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [*six_bit_scales(blocks[:, :, 4:16]), blocks[:, :, :4]]
