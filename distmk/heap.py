"""Put a rank's weights where its program expects them: its own shards and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.backend import Backend
from distmk.config import ModelConfig, inv_freq
from distmk.program import Program
from distmk.regions import Weight, WeightKind
from distmk.weights.checkpoint import Checkpoint

NUMPY_TYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
READ_BYTES = 8 << 20  # of a tensor at a time: what is in flight counts towards peak memory


def fill_constants(program: Program, backend: Backend, rank: int) -> None:
    """Copy the weights that were given as arrays."""
    for weight, placed in program.placement.weights.items():
        if weight.rank == rank and weight.data is not None:
            backend.view(placed, weight.data.dtype)[:] = weight.data.reshape(weight.rows, weight.cols)


def fill_weights(program: Program, backend: Backend, rank: int, checkpoint: Checkpoint) -> None:
    """Read this rank's shards; ModelError where the checkpoint turns out to be damaged."""
    for weight, placed in program.placement.weights.items():
        if weight.rank != rank or weight.kind is WeightKind.DATA:
            continue
        if weight.kind is WeightKind.MATRIX:
            _fill_matrix(backend.view(placed, np.uint16), weight, checkpoint)
        elif weight.kind is WeightKind.VECTOR:
            parts = [checkpoint.read_vector(s.tensor)[s.row_begin : s.row_end] for s in weight.segments]
            backend.view(placed, np.float32)[:, 0] = np.concatenate(parts)
        else:
            backend.view(placed, np.float32)[:] = rope_table(checkpoint.config, weight.rows)


def _fill_matrix(out: npt.NDArray[Any], weight: Weight, checkpoint: Checkpoint) -> None:
    cols = slice(weight.col_begin, weight.col_begin + weight.cols)
    step = max(1, READ_BYTES // (4 * weight.cols))
    at = 0
    for segment in weight.segments:
        for begin in range(segment.row_begin, segment.row_end, step):
            end = min(begin + step, segment.row_end)
            out[at : at + end - begin] = checkpoint.read(segment.tensor, slice(begin, end), cols)
            at += end - begin


def rope_table(config: ModelConfig, num_positions: int) -> npt.NDArray[np.float32]:
    """float32 [num_positions, head_dim]: cosines, then sines, of each position's angles (RoPE, arXiv:2104.09864)."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq(config)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
