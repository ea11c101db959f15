"""FP8 weights, E4M3 without infinities: an element is its code's value times a float32 scale, rounded once to float32.

E4M3: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (4 bits of exponent with bias 7, 3 of
mantissa; the largest value is 448, and codes 0x7f and 0xff are NaN).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distmk.formats.arrays import viewed
from distmk.formats.packed_tiles import PackedTiles
from distmk.formats.weight_format import U8, QuantizedRows, padded_codes, padded_to_host_groups
from distmk.model.bf16 import F32

LARGEST = 448.0
NAN = 0x7F
_SMALLEST_NORMAL = 2.0**-6


def e4m3_values() -> F32:
    """float32 [256]: the value of each code."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * _SMALLEST_NORMAL)
    values[codes & 0x7F == NAN] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_VALUES = e4m3_values()


def e4m3_codes(values: Any) -> Any:
    """The codes of float32 `values`, any shape: rounded to nearest, ties to even; beyond 448 they become 448."""
    if not isinstance(values, np.ndarray):
        import torch

        return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    magnitude = np.minimum(np.abs(values), np.float32(LARGEST))
    bits = magnitude.view(np.uint32)
    normal = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)) - np.uint32(120 << 3)
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.uint32)
    codes = np.where(magnitude < np.float32(_SMALLEST_NORMAL), subnormal, normal)
    signs = values.view(np.uint32) >> np.uint32(24) & np.uint32(0x80)
    signed: U8 = (codes | signs).astype(np.uint8)
    return signed


class E4m3(PackedTiles):
    """Rows of E4M3 codes with scales. A row on the host is its float32 scales, then its codes, padded.

    In tiles, 16 bits have the codes of two columns, so that each is a bf16 after a mask, or after a shift and a mask: the
    first at bits 15 (sign) and 10 to 4, the second at bits 11 (sign), 3 to 0 and 14 to 12 (its highest three).
    """

    element_bits = 8
    runs_on_gpu = True
    tiles_per_stage = 4

    @classmethod
    def num_groups(cls, num_cols: int) -> int:
        """Scales of a row."""
        return -(-num_cols // cls.group_cols)

    @classmethod
    def rows_bytes(cls, num_rows: int, num_cols: int) -> int:
        return num_rows * (4 * cls.num_groups(num_cols) + padded_to_host_groups(num_cols))

    @classmethod
    def values(cls, rows: QuantizedRows) -> F32:
        num_cols = rows.codes.shape[1]
        scales = np.repeat(
            rows.scales, -(-num_cols // rows.scales.shape[1]) if cls.group_cols == 1 else cls.group_cols, 1
        )
        return _VALUES[rows.codes] * scales[:, :num_cols]

    @classmethod
    def pack_rows(cls, rows: QuantizedRows) -> U8:
        scales = np.ascontiguousarray(rows.scales, np.float32)
        return np.concatenate([scales.view(np.uint8), padded_codes(rows.codes)], 1)

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        # Of four columns, the low half of a word has the first and the third, the high half the second and the fourth.
        four = viewed(codes, "int32").swapaxes(2, 3)
        words = (four & 0x80) << 8
        for shift, mask in ((4, 0x7F0), (-12, 0x800), (-16, 0xF), (16, -(1 << 31)), (12, 0x7F00000), (-4, 0x8000000)):
            words |= (four << shift if shift > 0 else four >> -shift) & mask
        words |= four >> 8 & 0xF7000
        words |= four & 0x70000000
        return words.reshape(*codes.shape[:2], codes.shape[3], -1)
