"""Seeded random weights, for compiling, testing and timing without a checkpoint.

Element (row, column) of a matrix is half of a 32-bit hash of its row's key and its column pair's key. All of this is
integer arithmetic, so numpy and torch on a GPU generate the same values, whatever part of the matrix a rank has.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.model.bf16 import F32, U16, bf16_to_f32, f32_to_bf16
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.weights.checkpoint import EMBEDDING, HEAD, PlainMatrices, RowRange, bounds
from distmk.weights.files import config_text

if TYPE_CHECKING:
    import torch

BLOCK_PAIRS = 1 << 15
"""Pairs of elements generated together: 128 KiB of hashes, which stay in a core's cache."""

HEAD_GAIN = 3.0
"""Standard deviation of the logits. It is well above bfloat16 rounding, so that the largest logit is usually unambiguous."""

NORM_SPREAD = 0.25
BIAS_SPREAD = 0.05
Keys = npt.NDArray[np.int32]


class DummyCheckpoint(PlainMatrices):
    """A `Checkpoint` of uniform random weights. An element depends only on the seed, its tensor and its indices.

    Matrices have the standard deviation 1 / sqrt(inputs), which keeps activations near 1; embedding and head have
    HEAD_GAIN / sqrt(hidden). Norm weights are in 1 +- NORM_SPREAD, biases in +- BIAS_SPREAD. All are exact in bfloat16.
    """

    def __init__(self, config: ModelConfig, path: Path | None, seed: int) -> None:
        self.config = config
        self.path = path
        self.notes: tuple[str, ...] = ()
        self.fingerprint = hashlib.sha256(f"dummy {seed}\n{config_text(config)}".encode()).hexdigest()
        self._seed = seed
        self._shapes = expected_tensors(config)

    def has(self, name: str) -> bool:
        return name in self._shapes or (name == HEAD and self.config.tie_embeddings)

    def close(self) -> None:
        return

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, out: U16 | None = None) -> U16:
        matrix, num_rows, num_cols = self._matrix(name)
        row_start, row_stop = bounds(rows, num_rows, f"{name} rows")
        col_start, col_stop = bounds(cols, num_cols, f"{name} columns")
        if out is None:
            out = np.empty((row_stop - row_start, col_stop - col_start), np.uint16)
        values = _values(_step(matrix, num_cols))
        row_keys = self._keys(matrix, row_start, row_stop)
        col_keys, skipped = self._col_keys(col_start, col_stop)
        step = max(1, BLOCK_PAIRS // max(1, len(col_keys)))
        for begin in range(0, len(row_keys), step):
            hashes = _mix(row_keys[begin : begin + step, None] ^ col_keys).view(np.uint16)
            hashes = hashes[:, skipped : skipped + out.shape[1]]
            np.take(values, hashes, out=out[begin : begin + step], mode="clip")
        return out

    def make(self, parts: Sequence[RowRange], cols: slice, out: torch.Tensor) -> None:
        """Write columns `cols` of `parts`, one below the other, to `out`: bfloat16 bits, int16 [rows, columns], on any
        device.

        The values are those of `read`. All `parts` must be of matrices with the same standard deviation. Needs about
        five times the bytes of `out` as temporary memory.
        """
        import torch

        matrix, _, num_cols = self._matrix(parts[0][0])
        start, stop = bounds(cols, num_cols, f"{matrix} columns")
        row_keys = np.concatenate([self._keys(self._matrix(name)[0], begin, end) for name, begin, end in parts])
        col_keys, skipped = self._col_keys(start, stop)
        row_tensor, col_tensor = (torch.from_numpy(keys).to(out.device) for keys in (row_keys, col_keys))
        hashes = _mix(row_tensor[:, None] ^ col_tensor).view(torch.int16)[:, skipped : skipped + stop - start]
        out.view(torch.bfloat16).copy_(hashes.float().add_(0.5).mul_(_step(matrix, num_cols)))

    def read_vector(self, name: str) -> F32:
        (size,) = self._shape(name, num_dims=1)
        center, spread = (0.0, BIAS_SPREAD) if name.endswith(".bias") else (1.0, NORM_SPREAD)
        values = center + spread * (self._keys(name, 0, size) / np.float64(1 << 31))
        return bf16_to_f32(f32_to_bf16(values.astype(np.float32)))

    def _matrix(self, name: str) -> tuple[str, int, int]:
        """The matrix that `name` reads (the embedding for a tied head), with its rows and columns."""
        if name == HEAD and self.config.tie_embeddings:
            name = EMBEDDING
        num_rows, num_cols = self._shape(name, num_dims=2)
        return name, num_rows, num_cols

    def _shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelError(f"dummy weights: no tensor {name}; the config calls for {len(self._shapes)} others")
        if len(shape) != num_dims:
            raise ModelError(f"dummy weights: tensor {name} has shape {list(shape)}; {num_dims}-D was expected")
        return shape

    def _col_keys(self, start: int, stop: int) -> tuple[Keys, int]:
        """int32 keys of the column pairs that overlap [start, stop), and the number of columns of the first pair to skip."""
        return self._keys("columns", start // 2, -(-stop // 2)), start % 2

    def _keys(self, what: str, start: int, stop: int) -> Keys:
        """Distinct keys of the rows [start, stop) of a tensor, or of other numbered things: int32 [stop - start]."""
        digest = hashlib.sha256(f"{self._seed} {what}".encode()).digest()
        offset = np.array(int.from_bytes(digest[:4], "little", signed=True), np.int32)
        keys: Keys = _mix(np.arange(start, stop, dtype=np.int32) + offset)
        return keys


def _mix(x: Any) -> Any:
    """Hash int32 numbers of numpy or torch in place, modulo 2**32.

    The hash is a bijection: different numbers stay different.

    After the "lowbias32" hash of C. Wellons, https://nullprogram.com/blog/2018/07/31 (its first step left out).
    """
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _step(name: str, num_cols: int) -> float:
    """Distance between adjacent values of a matrix, exact in float32. Uniform on +-a has standard deviation a / sqrt(3)."""
    gain = HEAD_GAIN if name in (EMBEDDING, HEAD) else 1.0
    return float(np.float32(gain * math.sqrt(3.0 / num_cols) / (1 << 15)))


@functools.lru_cache(maxsize=8)
def _values(step: float) -> U16:
    """uint16 [65536]: the bfloat16 bits for each 16-bit hash; values around 0, `step` apart before rounding."""
    hashes = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    return f32_to_bf16((hashes.astype(np.float32) + np.float32(0.5)) * np.float32(step))
