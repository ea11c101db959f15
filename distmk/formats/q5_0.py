"""GGUF's Q5_0: (code - 16) * d with codes of five bits, in blocks of 32 columns."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q5_0(GgufBlocks):
    """Blocks of 22 bytes."""

    id = 18
    name = "q5_0"
    kind = "Q5_0"
    element_bits = 5
    group_cols = 32
    block_bytes = 22
    half_offsets = (0,)
