"""FP8 E4M3 with a scale per block of 128 x 128 elements (DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437; Qwen3-*-FP8).

On the host every row has the scales of its blocks.
"""

from __future__ import annotations

from distmk.formats.e4m3 import E4m3


class Fp8Block(E4m3):
    """Scales are [rows, columns / 128]."""

    id = 2
    name = "fp8_block"
    group_cols = 128
