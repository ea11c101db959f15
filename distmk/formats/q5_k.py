"""GGUF's Q5_K: as Q4_K, with codes of five bits."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q5_K(GgufBlocks):
    """Blocks of 176 bytes."""

    id = 22
    name = "q5_k"
    kind = "Q5_K"
    element_bits = 5
    group_cols = 256
    block_bytes = 176
    half_offsets = (0, 2)
