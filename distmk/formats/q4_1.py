"""GGUF's Q4_1: code * d + m, in blocks of 32 columns."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q4_1(GgufBlocks):
    """Blocks of 20 bytes."""

    id = 17
    name = "q4_1"
    kind = "Q4_1"
    element_bits = 4
    group_cols = 32
    block_bytes = 20
    half_offsets = (0, 2)
