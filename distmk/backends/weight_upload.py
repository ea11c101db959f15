"""Put a rank's weights where its program expects them: its own shards and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distmk.backends.base import Backend
from distmk.graph.regions import Weight, WeightKind
from distmk.model.config import ModelConfig, inv_freq
from distmk.program.layout import Placed
from distmk.program.program import Program
from distmk.weights.bf16 import F32
from distmk.weights.checkpoint import Checkpoint, RowRange
from distmk.weights.packing import pack
from distmk.weights.rows import Rows, open_rows

NUMPY_TYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}


def fill_constants(program: Program, backend: Backend, rank: int) -> None:
    """Copy the weights that were given as arrays."""
    for weight, placed in program.placement.weights.items():
        if weight.rank == rank and weight.data is not None:
            backend.write(placed, 0, weight.data.reshape(weight.rows, weight.cols))


def fill_weights(program: Program, backend: Backend, rank: int, checkpoint: Checkpoint) -> None:
    """Read this rank's shards; ModelError where the checkpoint turns out to be damaged."""
    rows = open_rows(checkpoint, backend.device)
    for weight, placed in program.placement.weights.items():
        if weight.rank != rank or weight.kind is WeightKind.DATA:
            continue
        if weight.kind is WeightKind.VECTOR:
            parts = [checkpoint.read_vector(s.tensor)[s.row_begin : s.row_end] for s in weight.segments]
            backend.write(placed, 0, np.concatenate(parts)[:, None])
        elif weight.kind is WeightKind.ROPE:
            backend.write(placed, 0, rope_table(checkpoint.config, weight.rows))
        else:
            scale = checkpoint.read_vector(weight.col_scale) if weight.col_scale else None
            _fill_matrix(weight, placed, backend, rows, scale)


def _fill_matrix(weight: Weight, placed: Placed, backend: Backend, rows: Rows, scale: F32 | None) -> None:
    """A piece at a time, its columns times `scale`."""
    cols = slice(weight.col_begin, weight.col_begin + weight.cols)
    at = 0
    for slabs in _pieces(weight, rows.piece_bytes):
        end = at + sum(slabs)
        block = rows.read(list(_parts(weight, at, end)), cols)
        if scale is not None:
            rows.scale(block, scale[cols])
        backend.write(placed, at, pack(block, slabs, weight.tiling.paired) if weight.tiling else block)
        at = end


def _pieces(weight: Weight, max_bytes: int) -> Iterator[list[int]]:
    """A matrix' rows dealt into pieces: the rows of each slab in it, as many slabs (or rows) as `max_bytes` hold."""
    most = max(1, max_bytes // weight.row_bytes)
    if not weight.tiling:
        yield from ([min(most, weight.rows - begin)] for begin in range(0, weight.rows, most))
        return
    piece: list[int] = []
    for begin, end in weight.tiling.slabs:
        if piece and sum(piece) + end - begin > most:
            yield piece
            piece = []
        piece.append(end - begin)
    yield piece


def _parts(weight: Weight, first: int, last: int) -> Iterator[RowRange]:
    """The checkpoint's rows that rows [first, last) of a matrix are."""
    at = 0  # row of the weight that a segment starts at
    for segment in weight.segments:
        begin, end = max(first - at, 0), min(last - at, segment.rows)
        if begin < end:
            yield segment.tensor, segment.row_begin + begin, segment.row_begin + end
        at += segment.rows


def rope_table(config: ModelConfig, num_positions: int) -> npt.NDArray[np.float32]:
    """float32 [num_positions, head_dim]: cosines, then sines, of each position's angles (RoPE, arXiv:2104.09864)."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq(config)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
