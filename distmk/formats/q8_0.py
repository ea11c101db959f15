"""GGUF's Q8_0: code * d with signed bytes, in blocks of 32 columns."""

from __future__ import annotations

from distmk.formats.gguf_blocks import GgufBlocks


class Q8_0(GgufBlocks):
    """Blocks of 34 bytes."""

    id = 20
    name = "q8_0"
    kind = "Q8_0"
    element_bits = 8
    group_cols = 32
    block_bytes = 34
    half_offsets = (0,)
