"""GGUF's Q6_K: (code - 32) * (d * scale), in blocks of 256 columns with 16 scales of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import M_TILE
from distmk.formats.arrays import contiguous, library
from distmk.formats.gguf_blocks import GgufBlocks, nibbles
from distmk.formats.lane_words import packed_pairs


class Q6_K(GgufBlocks):
    """Blocks of 210 bytes, in tiles too."""

    id = 23
    name = "q6_k"
    kind = "Q6_K"
    element_bits = 6
    group_cols = 256
    block_bytes = 210
    half_offsets = (208,)
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * 18

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        shape = (*blocks.shape[:2], 2, -1)  # of 128 columns each
        low = nibbles(blocks[:, :, :128].reshape(*shape))
        high = blocks[:, :, 128:192].reshape(*shape)
        return low | library(blocks).concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], -1)

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [blocks[:, :, 192:208], blocks[:, :, 208:]]

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        # Lanes take the columns as order_in_halves() in csrc/device/formats/packed_tile.cuh orders the activations.
        pieces = codes.reshape(*codes.shape[:3], 2, 2, 2, 4)
        halves = contiguous(pieces.swapaxes(3, 5)).reshape(codes.shape)
        return library(codes).concatenate([packed_pairs(halves, 4), packed_pairs(halves >> 4, 2)], -1)
