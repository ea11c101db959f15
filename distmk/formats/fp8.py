"""FP8 E4M3 with a scale per row (output channel); also of files with a scale per tensor, which every row repeats."""

from __future__ import annotations

import numpy as np

from distmk.formats.e4m3 import LARGEST, E4m3, e4m3_codes
from distmk.formats.weight_format import QuantizedRows
from distmk.model.bf16 import F32, U16, bf16_to_f32


class Fp8(E4m3):
    """Scales are [rows, 1]."""

    id = 1
    name = "fp8"
    quantizes = True
    has_row_scales = True

    @classmethod
    def num_groups(cls, num_cols: int) -> int:
        return 1

    @classmethod
    def quantize(cls, rows: U16) -> QuantizedRows:
        values = bf16_to_f32(rows)
        largest: F32 = np.abs(values).max(1, keepdims=True)
        scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
        return QuantizedRows(e4m3_codes(values / scales), scales, np.empty((len(rows), 0), np.uint8))

    @classmethod
    def cut(cls, rows: QuantizedRows, begin: int, end: int) -> QuantizedRows:
        return rows._replace(codes=rows.codes[:, begin:end])
