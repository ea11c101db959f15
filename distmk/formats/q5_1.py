"""GGUF's Q5_1: code * d + m with codes of five bits, in blocks of 32 columns."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q5_1(GgufBlocks):
    """Blocks of 24 bytes."""

    id = 19
    name = "q5_1"
    kind = "Q5_1"
    element_bits = 5
    group_cols = 32
    block_bytes = 24
    half_offsets = (0, 2)
