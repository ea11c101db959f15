"""GGUF's Q5_K: as Q4_K, with codes of five bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import M_TILE
from distmk.formats.arrays import library
from distmk.formats.gguf_blocks import GgufBlocks, nibbles, six_bit_scales


class Q5_K(GgufBlocks):
    """Blocks of 176 bytes. In tiles they take 180, because a scale or minimum of six bits takes a byte; values are the same."""

    id = 22
    name = "q5_k"
    kind = "Q5_K"
    element_bits = 5
    group_cols = 256
    block_bytes = 176
    half_offsets = (0, 2)
    code_bits = 4
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * (32 + 20)  # the highest bits of codes, then the scales

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        low = nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32))  # of 64 columns each
        high = [(blocks[:, :, 16:48] >> group & 1) << 4 for group in range(8)]
        return low.reshape(*blocks.shape[:2], -1) | library(blocks).concatenate(high, -1)

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [*six_bit_scales(blocks[:, :, 4:16]), blocks[:, :, :4]]
