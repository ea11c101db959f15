"""GGUF's Q8_0: code * d with signed bytes, in blocks of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.gguf_blocks import GgufBlocks
from distmk.formats.lane_words import packed_bytes


class Q8_0(GgufBlocks):
    """Blocks of 34 bytes."""

    id = 20
    name = "q8_0"
    kind = "Q8_0"
    element_bits = 8
    group_cols = 32
    block_bytes = 34
    half_offsets = (0,)
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * K_TILE // group_cols * 2

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        return blocks[:, :, 2:]

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [blocks[:, :, :2]]

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        return packed_bytes(codes)
