"""Integers of 4 bits in groups: an element is (code - zero) * scale, with a float32 scale and a zero point per group.

Formats without zero points have the zero point 8 everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distmk.formats.arrays import cast, f32_of_bf16, largest_magnitudes, library, quotients, zeros
from distmk.formats.packed_tiles import PackedTiles
from distmk.formats.weight_format import HOST_GROUP, U8, QuantizedRows, padded_codes, padded_to_host_groups
from distmk.model.bf16 import F32

MIDDLE = 8
LARGEST_HALF = 65504.0  # the largest float16


class Int4Groups(PackedTiles):
    """A row on the host is its float32 scales, its zero points (a byte each), then its codes, padded.

    32 codes take 16 bytes: byte i has code i in its low half and code 16 + i in its high half.
    """

    element_bits = 4

    @classmethod
    def rows_bytes(cls, num_rows: int, num_cols: int) -> int:
        return num_rows * (5 * -(-num_cols // cls.group_cols) + padded_to_host_groups(num_cols) // 2)

    @classmethod
    def quantize(cls, rows: Any) -> QuantizedRows:
        """Codes 1 to 15 around the zero point 8, by the largest magnitude of a group. Scales are float16 numbers."""
        found, (num_rows, num_cols) = library(rows), rows.shape
        num_groups = -(-num_cols // cls.group_cols)
        padded = zeros((num_rows, num_groups * cls.group_cols), "float32", rows)
        padded[:, :num_cols] = f32_of_bf16(rows)
        groups = padded.reshape(num_rows, num_groups, cls.group_cols)
        largest = quotients(largest_magnitudes(groups), MIDDLE - 1).clip(0, LARGEST_HALF)
        steps = cast(cast(largest, "float16"), "float32")
        scales = found.where(steps > 0, steps, found.ones_like(steps))
        codes = cast(found.round(groups / scales).clip(-MIDDLE, MIDDLE - 1) + MIDDLE, "uint8")
        flat, scales = codes.reshape(num_rows, -1)[:, :num_cols], scales[:, :, 0]
        return QuantizedRows(flat, scales, zeros(scales.shape, "uint8", rows) + MIDDLE)

    @classmethod
    def values(cls, rows: QuantizedRows) -> F32:
        num_cols = rows.codes.shape[1]
        scales = np.repeat(rows.scales, cls.group_cols, 1)[:, :num_cols]
        zeros = np.repeat(rows.zeros, cls.group_cols, 1)[:, :num_cols].astype(np.float32)
        values: F32 = (rows.codes.astype(np.float32) - zeros) * scales
        return values

    @classmethod
    def pack_rows(cls, rows: QuantizedRows) -> U8:
        halves = padded_codes(rows.codes).reshape(len(rows.codes), -1, 2, HOST_GROUP // 2)
        nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(halves), -1)
        return np.concatenate([np.ascontiguousarray(rows.scales, np.float32).view(np.uint8), rows.zeros, nibbles], 1)
