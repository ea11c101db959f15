"""Conversion between float32 and bfloat16. numpy has no bfloat16, so its bits are stored as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FINITE_ELEMENTS = 1 << 16
"""Elements checked for NaN at a time: 128 KiB, which stay in a core's cache."""

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
I32 = npt.NDArray[np.int32]


def f32_to_bf16(values: F32) -> U16:
    """bfloat16 bits of float32 `values`, any shape: rounded to nearest, ties to even; NaNs become quiet NaNs.

    Overflow rounds to infinity, as in IEEE 754. The conversion needs about twice the bytes of `values`, so callers pass
    large tensors in pieces.
    """
    bits = np.asarray(values, np.float32, order="C").view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out: U16 = rounded.astype(np.uint16)
    # Rounding up would carry a NaN's low bits into its exponent or sign.
    nan = np.isnan(values)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16) | np.uint16(0x7FC0)
    return out


def bf16_to_f32(bits: U16) -> F32:
    """float32 values of bfloat16 `bits` (uint16), any shape; exact."""
    words = np.asarray(bits, np.uint16).astype(np.uint32, order="C")
    words <<= np.uint32(16)
    return words.view(np.float32)


def torch_to_bf16(tensor: Any) -> U16:
    """bfloat16 bits of a torch tensor of floats, on any device: a new, contiguous array; rounded to nearest, ties to even."""
    import torch  # the caller has imported it

    bits = tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous().view(torch.int16)
    encoded: U16 = bits.numpy().view(np.uint16)
    return encoded


def all_finite(bits: U16) -> bool:
    """Whether none of the bfloat16 `bits` [n] is NaN or infinite. Both have an exponent of ones."""
    pieces = (bits[begin : begin + FINITE_ELEMENTS] for begin in range(0, bits.size, FINITE_ELEMENTS))
    return all((piece & np.uint16(0x7FFF)).max() < 0x7F80 for piece in pieces)
