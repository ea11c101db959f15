"""Put a rank's weights where its program expects them: its own shards and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distmk.backend import Backend
from distmk.config import ModelConfig, inv_freq
from distmk.program import Program
from distmk.regions import Weight, WeightKind
from distmk.tiles import pack_slab
from distmk.weights.checkpoint import Checkpoint

NUMPY_TYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
READ_BYTES = 8 << 20  # of a tensor at a time: what is in flight counts towards peak memory


def fill_constants(program: Program, backend: Backend, rank: int) -> None:
    """Copy the weights that were given as arrays."""
    for weight, placed in program.placement.weights.items():
        if weight.rank == rank and weight.data is not None:
            backend.write(placed, 0, weight.data.reshape(weight.rows, weight.cols))


def fill_weights(program: Program, backend: Backend, rank: int, checkpoint: Checkpoint) -> None:
    """Read this rank's shards; ModelError where the checkpoint turns out to be damaged."""
    for weight, placed in program.placement.weights.items():
        if weight.rank != rank or weight.kind is WeightKind.DATA:
            continue
        if weight.kind is WeightKind.VECTOR:
            parts = [checkpoint.read_vector(s.tensor)[s.row_begin : s.row_end] for s in weight.segments]
            backend.write(placed, 0, np.concatenate(parts)[:, None])
        elif weight.kind is WeightKind.ROPE:
            backend.write(placed, 0, rope_table(checkpoint.config, weight.rows))
        elif weight.tiling:
            for begin, end in weight.tiling.slabs:
                rows = np.concatenate(list(_read_rows(weight, checkpoint, begin, end)))
                backend.write(placed, begin, pack_slab(rows, weight.tiling.paired))
        else:
            at = 0
            for rows in _read_rows(weight, checkpoint, 0, weight.rows):
                backend.write(placed, at, rows)
                at += len(rows)


def _read_rows(weight: Weight, checkpoint: Checkpoint, first: int, last: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Rows [first, last) of a matrix, a few at a time."""
    cols = slice(weight.col_begin, weight.col_begin + weight.cols)
    step = max(1, READ_BYTES // (4 * weight.cols))
    at = 0  # row of the weight that a segment starts at
    for segment in weight.segments:
        begin, stop = max(first - at, 0), min(last - at, segment.rows)
        for row in range(begin, stop, step):
            end = min(row + step, stop)
            yield checkpoint.read(segment.tensor, slice(segment.row_begin + row, segment.row_begin + end), cols)
        at += segment.rows


def rope_table(config: ModelConfig, num_positions: int) -> npt.NDArray[np.float32]:
    """float32 [num_positions, head_dim]: cosines, then sines, of each position's angles (RoPE, arXiv:2104.09864)."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq(config)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
