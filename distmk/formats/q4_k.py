"""GGUF's Q4_K: code * (d * scale) - dmin * min, in blocks of 256 columns with 8 scales and minima of 6 bits."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q4_K(GgufBlocks):
    """Blocks of 144 bytes."""

    id = 21
    name = "q4_k"
    kind = "Q4_K"
    element_bits = 4
    group_cols = 256
    block_bytes = 144
    half_offsets = (0, 2)
