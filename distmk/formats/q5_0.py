"""GGUF's Q5_0: (code - 16) * d with codes of five bits, in blocks of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.abi import K_TILE, M_TILE
from distmk.formats.gguf_blocks import GgufBlocks, fifth_bits, nibbles


class Q5_0(GgufBlocks):
    """Blocks of 22 bytes."""

    id = 18
    name = "q5_0"
    kind = "Q5_0"
    element_bits = 5
    group_cols = 32
    block_bytes = 22
    half_offsets = (0,)
    code_bits = 4
    runs_on_gpu = True
    tiles_per_stage = 4
    tile_scale_bytes = M_TILE * (32 + K_TILE // group_cols * 2)  # the highest bits of codes, then the scales

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        return nibbles(blocks[:, :, 6:]) | fifth_bits(blocks[:, :, 2:6])

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        return [blocks[:, :, :2]]
