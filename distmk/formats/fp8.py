"""FP8 E4M3 with a scale per row (output channel); also of files with a scale per tensor, which every row repeats."""

from __future__ import annotations

from typing import Any

from distmk.formats.arrays import f32_of_bf16, largest_magnitudes, library, quotients, zeros
from distmk.formats.e4m3 import LARGEST, E4m3, e4m3_codes
from distmk.formats.weight_format import QuantizedRows


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
    def quantize(cls, rows: Any) -> QuantizedRows:
        values = f32_of_bf16(rows)
        largest = largest_magnitudes(values)
        found = library(rows)
        scales = found.where(largest > 0, quotients(largest, LARGEST), found.ones_like(largest))
        return QuantizedRows(e4m3_codes(values / scales), scales, zeros((len(rows), 0), "uint8", rows))

    @classmethod
    def cut(cls, rows: QuantizedRows, begin: int, end: int) -> QuantizedRows:
        return rows._replace(codes=rows.codes[:, begin:end])
