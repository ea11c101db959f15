"""Weights that the caller has in memory, as torch tensors or numpy arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distmk.errors import ModelError, UsageError, shown
from distmk.model.bf16 import F32, U16, all_finite, f32_to_bf16, torch_to_bf16
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.weights.checkpoint import PlainMatrices, bounds, check_tensors
from distmk.weights.files import SAMPLE_BYTES, config_text

WHERE = "weights"
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def check_kinds(tensors: Mapping[str, Any]) -> None:
    """UsageError: a name is not text, or a value is not a dense tensor of floats with its data."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UsageError(
                f"{WHERE}: the name {shown(name)} is no text; give tensors by name, as a state_dict has them"
            )
        kind = type(tensor).__name__
        if dtype := getattr(tensor, "dtype", None):
            kind += f" of {dtype}"
        if not isinstance(tensor, np.ndarray) and str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
            kind += f" and {tensor.layout}"
        elif getattr(tensor, "is_meta", False):
            kind += " without data (on the device meta)"
        elif str(dtype).removeprefix("torch.") in _FLOATS:
            continue
        raise UsageError(f"{WHERE}: {name} is {kind}; a torch tensor or numpy array of floats was expected")


class TensorCheckpoint(PlainMatrices):
    """A `Checkpoint` of tensors by name.

    UsageError: a value is not a tensor of floats. ModelError: names or shapes are wrong.
    """

    path: Path | None = None

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any]) -> None:
        check_kinds(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.config = config
        self.notes = check_tensors(shapes, config, WHERE)
        self._tensors = {name: tensors[name] for name in expected_tensors(config)}
        self.fingerprint = self._fingerprint()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def close(self) -> None:
        self._tensors = {}

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, out: U16 | None = None) -> U16:
        tensor = self._tensor(name, num_dims=2)
        row_start, row_stop = bounds(rows, tensor.shape[0], f"{name} rows")
        col_start, col_stop = bounds(cols, tensor.shape[1], f"{name} columns")
        bits = _bf16_bits(tensor[row_start:row_stop, col_start:col_stop])
        if not all_finite(bits.reshape(-1)):
            raise self._not_finite(name)
        if out is None:
            return bits
        out[:] = bits
        return out

    def read_vector(self, name: str) -> F32:
        tensor = self._tensor(name, num_dims=1)
        vector = _float32(tensor)
        if not np.isfinite(vector).all():
            raise self._not_finite(name)
        return vector

    def _tensor(self, name: str, num_dims: int) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor.shape) != num_dims:
            raise ModelError(f"{WHERE}: there is no tensor {name} of {num_dims} dimensions")
        return tensor

    def _not_finite(self, name: str) -> ModelError:
        return ModelError(f"{WHERE}: {name} has weights that are NaN or infinite, or too large for bfloat16")

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(config_text(self.config).encode())
        for name, tensor in sorted(self._tensors.items()):
            first = tensor.reshape(-1)[: SAMPLE_BYTES // 4]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + _float32(first).tobytes())
        return digest.hexdigest()


def _bf16_bits(tensor: Any) -> U16:
    """The bits of a tensor as a new, contiguous array."""
    if isinstance(tensor, np.ndarray):
        with np.errstate(over="ignore"):
            return f32_to_bf16(np.ascontiguousarray(tensor, np.float32))
    return torch_to_bf16(tensor)


def _float32(tensor: Any) -> F32:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor, np.float32)
    return np.asarray(tensor.detach().to("cpu").float().numpy(), np.float32)
