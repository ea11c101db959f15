"""Tiles: the order in which a GPU worker streams a matrix (csrc/device/core/pipeline.cuh).

A slab is divided into M blocks of M_TILES_PER_BLOCK tile rows, and an M block into K blocks of K_TILES_PER_BLOCK tile
columns. The mainloop multiplies a K block with one load of activations. A K block contains its tiles (M_TILE x K_TILE,
smaller at the edges) tile row by tile row. Inside a tile, the 16-byte chunks of row r are XOR-swizzled by r % 8, so
that ldmatrix has no bank conflicts. In addition, in every LANE_COLS columns of a row the pairs of elements are
transposed, 4 by 4. The pairs of a lane's A fragments, one from each of four chunks, then belong to one chunk of its
activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.abi import K_TILE, K_TILES_PER_BLOCK, M_TILE, M_TILES_PER_BLOCK

M_BLOCK = M_TILES_PER_BLOCK * M_TILE
CHUNK = 8  # bf16 elements of 16 bytes
LANE_COLS = 4 * CHUNK
TILE_COLS = 64  # rows in tiles are padded to a multiple of this many columns
Ints = npt.NDArray[np.int64]


def padded_cols(num_cols: int) -> int:
    """The number of columns of a row in tiles."""
    return -(-num_cols // TILE_COLS) * TILE_COLS


class RowLayout(NamedTuple):
    """The place of each row of some slabs.

    block_begin, block_rows: first row and number of rows of its M block.
    tile_begin, tile_rows: first row (in the block) and number of rows of its tile.
    row: its row in the tile.
    """

    block_begin: Ints
    block_rows: Ints
    tile_begin: Ints
    tile_rows: Ints
    row: Ints


class ChunkLayout(NamedTuple):
    """The place of each chunk of a row.

    block_begin, block_chunks: first chunk and number of chunks of its K block.
    tile_begin, tile_chunks: first chunk (in the block) and number of chunks of its tile.
    chunk: its chunk in the tile.
    """

    block_begin: Ints
    block_chunks: Ints
    tile_begin: Ints
    tile_chunks: Ints
    chunk: Ints


def pack_rows(rows: Any, slabs: Sequence[int], paired: bool) -> Any:
    """Pack bf16 rows [n, k], consecutive slabs of `slabs` rows each, in tiles: [n, k rounded up to TILE_COLS].

    `rows` and the result are numpy arrays of uint16, or torch tensors of int16 on one device, all contiguous. `paired`
    slabs contain gate rows, then as many up rows. Every tile gets up to 8 of each, so that the sums of a pair are in
    one tile. Packing needs about six times the bytes of `rows`.
    """
    zeros: Any
    asarray: Any
    words: Any
    if isinstance(rows, np.ndarray):
        zeros, asarray, words = partial(np.zeros, dtype=rows.dtype), np.asarray, np.int64
    else:
        import torch  # only if rows are tensors already, so torch has been imported

        zeros, asarray, words = rows.new_zeros, partial(torch.as_tensor, device=rows.device), torch.int64
    num_rows, num_cols = rows.shape
    pitch = padded_cols(num_cols)
    if pitch > num_cols:
        padded = zeros((num_rows, pitch))
        padded[:, :num_cols] = rows
        rows = padded
    row_layout, chunk_layout = tile_layout(slabs, pitch // CHUNK, paired)
    m_block, m_block_rows, m_tile, m_tile_rows, row = (asarray(part)[:, None] for part in row_layout)
    k_block, k_block_chunks, k_tile, k_tile_chunks, chunk = (asarray(part) for part in chunk_layout)
    target = (chunk ^ (row % 8)) + row * k_tile_chunks  # in place from here on: one array of this size at a time
    target += m_tile_rows * k_tile
    target += m_tile * k_block_chunks
    target += m_block_rows * k_block
    target += m_block * (pitch // CHUNK)
    packed = zeros((num_rows, pitch))
    chunks = transposed_pairs(rows).reshape(-1).view(words).reshape(-1, 2)
    packed.reshape(-1).view(words).reshape(-1, 2)[target.reshape(-1)] = chunks
    return packed


def transposed_pairs(rows: Any) -> Any:
    """bf16 rows [n, a multiple of LANE_COLS], contiguous.

    In every LANE_COLS columns, pair i of chunk j becomes pair j of chunk i.
    """
    if isinstance(rows, np.ndarray):
        pairs: Any = rows.reshape(-1).view(np.uint32).reshape(-1, 4, 4)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1).view(rows.dtype).reshape(rows.shape)
    import torch

    pairs = rows.reshape(-1).view(torch.int32).reshape(-1, 4, 4)
    return pairs.transpose(1, 2).contiguous().reshape(-1).view(rows.dtype).reshape(rows.shape)


def tile_layout(slabs: Sequence[int], num_chunks: int, paired: bool) -> tuple[RowLayout, ChunkLayout]:
    """The layout of slabs whose rows have `num_chunks` chunks. This is the only definition of the layout.

    With r the layout of a row and c the layout of a chunk, the chunk has this number among the packed chunks:
    `r.block_begin * num_chunks + r.block_rows * c.block_begin + r.tile_begin * c.block_chunks + r.tile_rows *
    c.tile_begin + r.row * c.tile_chunks + (c.chunk ^ r.row % 8)`.
    """
    num_rows = sum(slabs)
    row_layout = RowLayout(*(np.empty(num_rows, np.int64) for _ in RowLayout._fields))
    first = 0
    for slab in slabs:
        position = np.arange(slab)  # in the packed slab
        source = first + packed_order(slab, paired)
        in_tile, in_block = position % M_TILE, position % M_BLOCK
        row_layout.block_begin[source] = first + position - in_block
        row_layout.block_rows[source] = np.minimum(M_BLOCK, slab - (position - in_block))
        row_layout.tile_begin[source] = in_block - in_tile
        row_layout.tile_rows[source] = np.minimum(M_TILE, slab - (position - in_tile))
        row_layout.row[source] = in_tile
        first += slab
    chunk, per_tile = np.arange(num_chunks), K_TILE // CHUNK
    per_block = K_TILES_PER_BLOCK * per_tile
    in_tile, in_block = chunk % per_tile, chunk % per_block
    return row_layout, ChunkLayout(
        block_begin=chunk - in_block,
        block_chunks=np.minimum(per_block, num_chunks - (chunk - in_block)),
        tile_begin=in_block - in_tile,
        tile_chunks=np.minimum(per_tile, num_chunks - (chunk - in_tile)),
        chunk=in_tile,
    )


def packed_order(num_rows: int, paired: bool) -> Ints:
    """The row of a slab at each packed position. Paired: half a tile of gate rows, then the up rows that belong to them."""
    if not paired:
        return np.arange(num_rows)
    half, per_tile = num_rows // 2, M_TILE // 2
    order = []
    for begin in range(0, half, per_tile):
        pairs = np.arange(begin, min(begin + per_tile, half))
        order += [pairs, pairs + half]
    return np.concatenate(order)
