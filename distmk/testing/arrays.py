"""Arrays as bytes, poisoned memory, and a comparison that prints coordinates."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]
Array: TypeAlias = npt.NDArray[Any]


def to_bytes(data: Array | torch.Tensor | ctypes.Structure) -> Bytes:
    """The bytes of `data`, in one dimension."""
    if isinstance(data, torch.Tensor):
        whole = data.detach().contiguous()
        data = (whole if whole.dim() else whole.reshape(1)).view(torch.uint8).numpy()
    if isinstance(data, ctypes.Structure):
        return np.frombuffer(bytes(data), dtype=np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def floats(raw: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Bytes of dtype "f32" or "bf16" as float32."""
    return raw.view(np.float32) if dtype == "f32" else (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


ROUNDING = {"f32": 0.0, "bf16": 2.0**-8}
"""Largest relative error of rounding to nearest, by dtype."""


def poison(rng: np.random.Generator, num_bytes: int) -> Bytes:
    """Random bytes that read as NaN in float32 and in bf16.

    Because they are random, a copy of poison shows as a change, too.
    """
    num_halves = -(-num_bytes // 2)
    halves = rng.integers(0x7F81, 0x8000, num_halves, dtype=np.uint16)
    signs = rng.choice(np.array([0, 0x8000], dtype=np.uint16), num_halves)
    raw: Bytes = (halves | signs).view(np.uint8)
    return raw[:num_bytes]


def assert_close(
    what: str, got: Array | torch.Tensor, want: Array | torch.Tensor, tolerance: Array | torch.Tensor | float
) -> None:
    """Raise AssertionError with coordinates and values of the first eight elements that are off by more than `tolerance`."""
    got, want, tolerance = (np.asarray(each, dtype=np.float64) for each in (got, want, tolerance))
    tolerance = np.broadcast_to(tolerance, want.shape)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.abs(got - want) <= tolerance)  # NaN is never right
    bad = np.argwhere(~same)
    lines = (f"{what}{[*map(int, at)]}: got {got[tuple(at)]}, expected {want[tuple(at)]}" for at in bad)
    assert not len(bad), f"{len(bad)} of {got.size} wrong\n" + "\n".join(itertools.islice(lines, 8))
