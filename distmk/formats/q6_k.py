"""GGUF's Q6_K: (code - 32) * (d * scale), in blocks of 256 columns with 16 scales of 8 bits."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q6_K(GgufBlocks):
    """Blocks of 210 bytes."""

    id = 23
    name = "q6_k"
    kind = "Q6_K"
    element_bits = 6
    group_cols = 256
    block_bytes = 210
    half_offsets = (208,)
