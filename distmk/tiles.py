"""Weights in the order in which a GPU worker streams them (csrc/device/ring.cuh).

A slab is cut into groups of TILE_ROWS rows, a group into tiles of TILE_COLS_PER_STAGE columns; a tile is one bulk copy. Inside
a tile the 16-byte chunks of row r are exchanged by r % 8, so that a tensor core's loads meet no bank of shared memory twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distmk.regions import TILE_COLS

TILE_ROWS = 16
COLS_PER_TILE = 256
CHUNK = 8  # bf16 elements of 16 bytes


def pack_slab(rows: npt.NDArray[np.uint16], paired: bool) -> npt.NDArray[np.uint16]:
    """bf16 rows [n, k] as [n, k rounded up to 64], packed in tiles.

    `paired` slabs hold gate rows, then as many up rows; every group gets up to 8 of each, so that a pair's two sums end up
    in one group.
    """
    num_rows, num_cols = rows.shape
    padded = np.zeros((num_rows, -(-num_cols // TILE_COLS) * TILE_COLS), np.uint16)
    padded[:, :num_cols] = rows[_pair_order(num_rows)] if paired else rows
    packed = np.empty(padded.size, np.uint16)
    at = 0
    for begin in range(0, num_rows, TILE_ROWS):
        group = padded[begin : begin + TILE_ROWS]
        swizzle = np.arange(len(group)) % 8
        for col in range(0, padded.shape[1], COLS_PER_TILE):
            tile = group[:, col : col + COLS_PER_TILE].reshape(len(group), -1, CHUNK)
            source = np.arange(tile.shape[1])[None, :] ^ swizzle[:, None]
            size = tile.size
            packed[at : at + size] = np.take_along_axis(tile, source[:, :, None], axis=1).reshape(-1)
            at += size
    result: npt.NDArray[np.uint16] = packed.reshape(padded.shape)
    return result


def _pair_order(num_rows: int) -> npt.NDArray[np.int64]:
    half, per_group = num_rows // 2, TILE_ROWS // 2
    order = []
    for begin in range(0, half, per_group):
        pairs = np.arange(begin, min(begin + per_group, half))
        order += [pairs, pairs + half]
    return np.concatenate(order)
