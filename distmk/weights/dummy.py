"""Seeded random weights, for compiling, testing and timing without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distmk.config import ModelConfig
from distmk.errors import ModelError
from distmk.weights.bf16 import bf16_to_f32, f32_to_bf16
from distmk.weights.checkpoint import EMBEDDING, HEAD, bounds, expected_tensors
from distmk.weights.files import config_text

BLOCK_ROWS = 64
"""Rows made together: large enough to hide the cost of seeding, small beside a rank's rows."""

HEAD_GAIN = 3.0
"""Standard deviation of the logits; well above bfloat16 rounding, so that the largest logit is usually clear."""

NORM_SPREAD = 0.25
BIAS_SPREAD = 0.05


class DummyCheckpoint:
    """A `Checkpoint` of uniform random weights; an element's value hangs only on the seed, its tensor and its place.

    Matrices have the standard deviation 1 / sqrt(inputs) that keeps activations near 1 (embedding and head:
    HEAD_GAIN / sqrt(hidden)), norm weights lie in 1 +- NORM_SPREAD, biases within +- BIAS_SPREAD; all are exact in
    bfloat16.
    """

    def __init__(self, config: ModelConfig, path: Path | None, seed: int) -> None:
        self.config = config
        self.path = path
        self.fingerprint = hashlib.sha256(f"dummy {seed}\n{config_text(config)}".encode()).hexdigest()
        self._seed = seed
        self._shapes = expected_tensors(config)

    def has(self, name: str) -> bool:
        return name in self._shapes or (name == HEAD and self.config.tie_embeddings)

    def close(self) -> None:
        return

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> npt.NDArray[np.uint16]:
        if name == HEAD and self.config.tie_embeddings:
            name = EMBEDDING
        num_rows, num_cols = self._shape(name, num_dims=2)
        row_start, row_stop = bounds(rows, num_rows, f"{name} rows")
        col_start, col_stop = bounds(cols, num_cols, f"{name} columns")
        gain = HEAD_GAIN if name in (EMBEDDING, HEAD) else 1.0
        # A uniform variable on +-a has the standard deviation a / sqrt(3).
        values = _uniform_table(0.0, gain * math.sqrt(3.0 / num_cols))
        out = np.empty((row_stop - row_start, col_stop - col_start), np.uint16)
        for block in range(row_start // BLOCK_ROWS, -(-row_stop // BLOCK_ROWS) if out.size else 0):
            first = block * BLOCK_ROWS
            start, stop = max(first, row_start), min(first + BLOCK_ROWS, row_stop)
            picks = self._random(name, block, BLOCK_ROWS * num_cols).reshape(BLOCK_ROWS, num_cols)
            out[start - row_start : stop - row_start] = values[picks[start - first : stop - first, col_start:col_stop]]
        return out

    def read_vector(self, name: str) -> npt.NDArray[np.float32]:
        (size,) = self._shape(name, num_dims=1)
        values = _uniform_table(0.0, BIAS_SPREAD) if name.endswith(".bias") else _uniform_table(1.0, NORM_SPREAD)
        return bf16_to_f32(values[self._random(name, 0, size)])

    def _shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelError(f"dummy weights: no tensor {name}; the config calls for {len(self._shapes)} others")
        if len(shape) != num_dims:
            raise ModelError(f"dummy weights: tensor {name} has shape {list(shape)}; {num_dims}-D was expected")
        return shape

    def _random(self, name: str, block: int, count: int) -> npt.NDArray[np.uint16]:
        """`count` uniform 16-bit numbers of their own for each (seed, name, block): uint16 [count].

        numpy keeps the stream of a bit generator the same from release to release.
        """
        key = hashlib.sha256(f"{self._seed} {name} {block}".encode()).digest()[:16]
        raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-count // 4))
        return raw.astype("<u8", copy=False).view("<u2")[:count]


def _uniform_table(center: float, spread: float) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of 65,536 evenly spaced values within center +- spread, so that a look-up draws from them."""
    steps = (np.arange(1 << 16, dtype=np.float64) + 0.5) / (1 << 15) - 1.0
    return f32_to_bf16((center + spread * steps).astype(np.float32))
