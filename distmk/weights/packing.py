"""Weights in the order in which a GPU worker streams them (csrc/device/core/pipeline.cuh).

A slab is cut into groups of M_TILE rows, a group into tiles of K_TILE columns; a tile is one bulk copy. They come in
rounds of M_TILES_PER_BLOCK groups, a round in blocks of K_TILES_PER_BLOCK columns of tiles, a block group by group: it is what
is multiplied with one load of activations. Inside a tile the 16-byte chunks of row r are exchanged by r % 8, so that a
tensor core's loads meet no bank of shared memory twice. And of every LANE_COLS columns the pairs are transposed, 4 by 4:
what a lane multiplies is then a pair of each of four chunks here, but one chunk of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.abi import K_TILE, K_TILES_PER_BLOCK, M_TILE, M_TILES_PER_BLOCK
from distmk.graph.regions import TILE_COLS

M_BLOCK = M_TILES_PER_BLOCK * M_TILE
CHUNK = 8  # bf16 elements of 16 bytes
LANE_COLS = 4 * CHUNK
Ints = npt.NDArray[np.int64]


class RowPlaces(NamedTuple):
    """Of each row of some slabs: its round's first row and rows, its group's first row (in the round) and rows, its place
    in the group.
    """

    round_begin: Ints
    round_rows: Ints
    group_begin: Ints
    group_rows: Ints
    line: Ints


class ChunkPlaces(NamedTuple):
    """Of each chunk of a row: its block's first chunk and chunks, its tile's first chunk (in the block) and chunks, its
    place in the tile.
    """

    block_begin: Ints
    block_chunks: Ints
    tile_begin: Ints
    tile_chunks: Ints
    place: Ints


def pack(rows: Any, slabs: Sequence[int], paired: bool) -> Any:
    """bf16 rows [n, k] of consecutive slabs of so many rows each as [n, k rounded up to TILE_COLS], packed in tiles.

    `rows` and the result are numpy arrays of uint16, or torch tensors of int16 on one device; all are contiguous.
    `paired` slabs hold gate rows, then as many up rows; every group gets up to 8 of each, so that a pair's two sums end up
    in one group. Needs about six times the bytes of `rows` meanwhile.
    """
    zeros: Any
    asarray: Any
    wide: Any
    if isinstance(rows, np.ndarray):
        zeros, asarray, wide = partial(np.zeros, dtype=rows.dtype), np.asarray, np.int64
    else:
        import torch  # only where rows are in its memory already

        zeros, asarray, wide = rows.new_zeros, partial(torch.as_tensor, device=rows.device), torch.int64
    num_rows, num_cols = rows.shape
    pitch = -(-num_cols // TILE_COLS) * TILE_COLS
    if pitch > num_cols:
        padded = zeros((num_rows, pitch))
        padded[:, :num_cols] = rows
        rows = padded
    row_places, chunk_places = places(slabs, pitch // CHUNK, paired)
    round_begin, round_rows, group, height, line = (asarray(part)[:, None] for part in row_places)
    block, block_chunks, tile, width, chunk = (asarray(part) for part in chunk_places)
    place = (chunk ^ (line % 8)) + line * width
    place += height * tile
    place += group * block_chunks
    place += round_rows * block
    place += round_begin * (pitch // CHUNK)
    packed = zeros((num_rows, pitch))
    chunks = transposed_pairs(rows).reshape(-1).view(wide).reshape(-1, 2)
    packed.reshape(-1).view(wide).reshape(-1, 2)[place.reshape(-1)] = chunks
    return packed


def transposed_pairs(rows: Any) -> Any:
    """bf16 rows [n, a multiple of LANE_COLS], contiguous, with pair i of chunk j of every LANE_COLS as pair j of chunk i."""
    if isinstance(rows, np.ndarray):
        pairs: Any = rows.reshape(-1).view(np.uint32).reshape(-1, 4, 4)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1).view(rows.dtype).reshape(rows.shape)
    import torch

    pairs = rows.reshape(-1).view(torch.int32).reshape(-1, 4, 4)
    return pairs.transpose(1, 2).contiguous().reshape(-1).view(rows.dtype).reshape(rows.shape)


def places(slabs: Sequence[int], num_chunks: int, paired: bool) -> tuple[RowPlaces, ChunkPlaces]:
    """Where the rows and the chunks of slabs go: the one definition of the layout.

    Chunk c of row r is packed chunk `round_begin[r] * num_chunks + round_rows[r] * block_begin[c] + group_begin[r] *
    block_chunks[c] + group_rows[r] * tile_begin[c] + line[r] * tile_chunks[c] + (place[c] ^ line[r] % 8)`.
    """
    num_rows = sum(slabs)
    found = RowPlaces(*(np.empty(num_rows, np.int64) for _ in RowPlaces._fields))
    first = 0
    for slab in slabs:
        at = np.arange(slab)
        source = first + (_pair_order(slab) if paired else at)
        line, in_round = at % M_TILE, at % M_BLOCK
        found.round_begin[source] = first + at - in_round
        found.round_rows[source] = np.minimum(M_BLOCK, slab - (at - in_round))
        found.group_begin[source] = in_round - line
        found.group_rows[source] = np.minimum(M_TILE, slab - (at - line))
        found.line[source] = line
        first += slab
    chunk, per_tile = np.arange(num_chunks), K_TILE // CHUNK
    per_block = K_TILES_PER_BLOCK * per_tile
    in_tile, in_block = chunk % per_tile, chunk % per_block
    return found, ChunkPlaces(
        block_begin=chunk - in_block,
        block_chunks=np.minimum(per_block, num_chunks - (chunk - in_block)),
        tile_begin=in_block - in_tile,
        tile_chunks=np.minimum(per_tile, num_chunks - (chunk - in_tile)),
        place=in_tile,
    )


def _pair_order(num_rows: int) -> Ints:
    """The row of a paired slab that each packed row is."""
    half, per_group = num_rows // 2, M_TILE // 2
    order = []
    for begin in range(0, half, per_group):
        pairs = np.arange(begin, min(begin + per_group, half))
        order += [pairs, pairs + half]
    return np.concatenate(order)
