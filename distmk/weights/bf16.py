"""Conversion between float32 and bfloat16, the latter held as its bits in uint16 (numpy has no bfloat16)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


def f32_to_bf16(values: F32) -> U16:
    """bfloat16 bits of float32 `values`, any shape: rounded to nearest, ties to even; NaNs become quiet NaNs.

    Overflow goes to infinity, as IEEE 754 rounding has it. Works on a whole array at once and needs about twice its
    bytes meanwhile, so callers with large tensors pass pieces.
    """
    bits = np.asarray(values, np.float32, order="C").view(np.uint32)
    out_bf16 = bits >> np.uint32(16)
    out_bf16 &= np.uint32(1)
    out_bf16 += np.uint32(0x7FFF)
    out_bf16 += bits
    out_bf16 >>= np.uint32(16)
    out: U16 = out_bf16.astype(np.uint16)
    # A NaN's low bits would carry into the exponent or sign above.
    nan = np.isnan(values)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16) | np.uint16(0x7FC0)
    return out


def bf16_to_f32(bits: U16) -> F32:
    """float32 values of bfloat16 `bits` (uint16), any shape; exact."""
    wide = np.asarray(bits, np.uint16).astype(np.uint32, order="C")
    wide <<= np.uint32(16)
    return wide.view(np.float32)
