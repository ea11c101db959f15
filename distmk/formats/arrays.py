"""What numpy arrays and torch tensors name differently. Weights are quantized and packed as both: on the host, and on a GPU.

Words are int32: torch has no shifts of uint32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distmk.model.bf16 import bf16_to_f32


def library(array: Any) -> Any:
    """numpy or torch."""
    if isinstance(array, np.ndarray):
        return np
    import torch  # only if arrays are tensors already, so torch has been imported

    return torch


def cast(array: Any, dtype: str) -> Any:
    """The values as numbers of a type, such as "uint8"."""
    if isinstance(array, np.ndarray):
        return array.astype(dtype)
    return array.to(getattr(library(array), dtype))


def viewed(array: Any, dtype: str) -> Any:
    """The bytes of a contiguous array as numbers of a type, or of one whose last axis is whole numbers."""
    return contiguous(array).view(dtype if isinstance(array, np.ndarray) else getattr(library(array), dtype))


def contiguous(array: Any) -> Any:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def zeros(shape: Sequence[int], dtype: str, like: Any) -> Any:
    """Zeros where `like` is."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, dtype)
    return like.new_zeros(tuple(shape), dtype=getattr(library(like), dtype))


def as_indices(indices: Any, like: Any) -> Any:
    """Indices of `like`."""
    if isinstance(like, np.ndarray):
        return np.asarray(indices)
    return library(like).as_tensor(indices, device=like.device)


def f32_of_bf16(rows: Any) -> Any:
    """bfloat16 bits as float32."""
    if isinstance(rows, np.ndarray):
        return bf16_to_f32(rows)
    return rows.view(library(rows).bfloat16).float()


def largest_magnitudes(values: Any) -> Any:
    """Of the last axis, which stays with a length of 1."""
    return np.abs(values).max(-1, keepdims=True) if isinstance(values, np.ndarray) else values.abs().amax(-1, True)


def quotients(values: Any, divisor: float) -> Any:
    """values / divisor, rounded once. By a number, torch would multiply by its reciprocal on a GPU."""
    return values / library(values).full_like(values, divisor)
