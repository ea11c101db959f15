"""GGUF's Q4_0: (code - 8) * d, in blocks of 32 columns."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q4_0(GgufBlocks):
    """Blocks of 18 bytes."""

    id = 16
    name = "q4_0"
    kind = "Q4_0"
    element_bits = 4
    group_cols = 32
    block_bytes = 18
    half_offsets = (0,)
