"""bfloat16 weights: two bytes an element, without scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmk.formats.tiles import pack_rows
from distmk.formats.weight_format import WeightFormat


class Bf16(WeightFormat):
    """bfloat16 bits, as uint16 in numpy and int16 in torch."""

    id = 0
    name = "bf16"
    element_bits = 16
    is_quantized = False
    folds_factors = True  # products are rounded once, as the checkpoint's elements were
    runs_on_gpu = True

    @classmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        return num_rows * cls.pitch(num_cols, tiled) * 2

    @classmethod
    def pack(cls, rows: Any, slabs: Sequence[int], paired: bool) -> Any:
        return pack_rows(rows, slabs, paired)
