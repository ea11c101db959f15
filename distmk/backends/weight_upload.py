"""Weight upload: read a rank's shards from the checkpoint, pack them, and write them to its allocations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distmk.backends.base import Backend
from distmk.graph.regions import Weight, WeightKind
from distmk.model.bf16 import F32
from distmk.model.rope import rope_table
from distmk.program.layout import Placed
from distmk.program.program import Program
from distmk.progress import Progress
from distmk.weights.checkpoint import Checkpoint, RowRange
from distmk.weights.rows import Rows, Tiled, open_rows

NUMPY_TYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}


def upload_constants(program: Program, backend: Backend, rank: int) -> None:
    """Upload the weights that the graph has as arrays."""
    for weight, allocation in program.placement.weights.items():
        if weight.rank == rank and weight.data is not None:
            block = weight.data
            if weight.tiling and not weight.format.is_quantized:
                block = block.reshape(weight.rows, weight.cols)
                slabs = [end - begin for begin, end in weight.tiling.slabs]
                block = weight.format.pack(block, slabs, weight.tiling.paired)
            backend.write(allocation, 0, block)


def fill_weights(
    program: Program, backend: Backend, rank: int, checkpoint: Checkpoint, loaded: Progress | None = None
) -> None:
    """Upload the weights that come from `checkpoint`, only the shards of `rank`. ModelError: a file is damaged.

    `loaded` counts their bytes.
    """
    loaded = loaded or Progress("")
    rows = open_rows(checkpoint, backend.device)
    every = program.placement.weights.items()
    wanted = [(w, allocation) for w, allocation in every if w.rank == rank and w.kind is not WeightKind.DATA]
    loaded.expect(sum(weight.num_bytes for weight, _ in wanted), "B")
    for weight, allocation in wanted:
        if weight.kind is WeightKind.VECTOR:
            parts = [checkpoint.read_vector(s.tensor)[s.row_begin : s.row_end] for s in weight.segments]
            backend.write(allocation, 0, _scaled(weight, np.concatenate(parts))[:, None])
        elif weight.kind is WeightKind.ORDER:
            backend.write(allocation, 0, checkpoint.read_order(weight.segments[0].tensor)[:, None])
        elif weight.kind is WeightKind.ROPE:
            backend.write(allocation, 0, rope_table(checkpoint.config, weight.rows, weight.name))
        else:
            _upload_matrix(weight, allocation, backend, rows, _col_factors(weight, checkpoint), loaded)
            continue
        loaded.add(weight.num_bytes)


def _col_factors(weight: Weight, checkpoint: Checkpoint) -> F32 | None:
    """The factors that the columns of a matrix are multiplied by, float32 [cols or 1]; None: there are no factors."""
    if weight.col_scale is None:
        return None if weight.scale == 1.0 else np.full(1, weight.scale, np.float32)
    cols = slice(weight.col_begin, weight.col_begin + weight.cols)
    return _scaled(weight, checkpoint.read_vector(weight.col_scale)[cols])


def _scaled(weight: Weight, vector: F32) -> F32:
    values: F32 = (vector + np.float32(weight.offset)) * np.float32(weight.scale)
    return values


def _upload_matrix(
    weight: Weight, allocation: Placed, backend: Backend, rows: Rows, factors: F32 | None, loaded: Progress
) -> None:
    """Upload a matrix in pieces, its columns multiplied by `factors`."""
    cols = slice(weight.col_begin - weight.lead, weight.col_begin + weight.cols + weight.tail)
    begin = 0
    for slabs in _pieces(weight, rows.piece_bytes):
        end = begin + sum(slabs)
        parts = list(_row_ranges(weight, begin, end))
        if weight.format.is_quantized:
            tiled = Tiled(slabs, weight.tiling.paired) if weight.tiling else None
            stored = rows.read_packed(parts, cols, weight.format, factors, tiled)
        else:
            stored = rows.read(parts, cols)
            if factors is not None:
                rows.scale(stored, factors)
            if weight.tiling:
                stored = weight.format.pack(stored, slabs, weight.tiling.paired)
        offset = weight.offset_of(begin)
        backend.write(allocation, offset, stored)
        loaded.add(weight.offset_of(end) - offset)
        begin = end


def _pieces(weight: Weight, max_bytes: int) -> Iterator[list[int]]:
    """Divide a matrix' rows into pieces of at most `max_bytes` but at least one slab (or row).

    Yields the rows of each slab of a piece.
    """
    max_rows = max(1, max_bytes // weight.bytes_of(1))
    if not weight.tiling:
        yield from ([min(max_rows, weight.rows - begin)] for begin in range(0, weight.rows, max_rows))
        return
    piece: list[int] = []
    for begin, end in weight.tiling.slabs:
        if piece and sum(piece) + end - begin > max_rows:
            yield piece
            piece = []
        piece.append(end - begin)
    yield piece


def _row_ranges(weight: Weight, first: int, last: int) -> Iterator[RowRange]:
    """The checkpoint's rows that make up rows [first, last) of a matrix."""
    segment_begin = 0  # in rows of the weight
    for segment in weight.segments:
        begin, end = max(first - segment_begin, 0), min(last - segment_begin, segment.rows)
        if begin < end:
            yield segment.tensor, segment.row_begin + begin, segment.row_begin + end
        segment_begin += segment.rows
