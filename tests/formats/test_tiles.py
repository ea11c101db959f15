"""Packing of weights in tiles, in numpy and in torch, against a loop over chunks that follows the layout's description."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from distmk.formats.tiles import CHUNK, pack_rows

U16 = npt.NDArray[np.uint16]


def packed_slowly(slab: U16, paired: bool) -> list[U16]:
    """Chunks of one slab in the order in which a worker streams them."""
    half = len(slab) // 2
    rows = list(range(len(slab)))
    if paired:  # up to 8 gate rows, then the up rows that belong to them
        rows = [
            row for at in range(0, half, 8) for part in (0, half) for row in range(at + part, min(at + 8, half) + part)
        ]
    chunks = []
    tile_rows = [rows[at : at + 16] for at in range(0, len(rows), 16)]
    for first in range(0, len(tile_rows), 4):  # M blocks of four tile rows, K blocks of eight tile columns
        for block in range(0, slab.shape[1], 2048):
            for tile_row in tile_rows[first : first + 4]:
                for col in range(block, min(block + 2048, slab.shape[1]), 256):
                    num_chunks = min(256, slab.shape[1] - col) // CHUNK
                    for number, row in enumerate(tile_row):
                        for position in range(num_chunks):
                            chunk = position ^ number % 8  # a pair of each of four chunks, side by side
                            begin = col + chunk // 4 * 4 * CHUNK + chunk % 4 * 2
                            pairs = [slab[row, at : at + 2] for at in range(begin, begin + 4 * CHUNK, CHUNK)]
                            chunks.append(np.concatenate(pairs))
    return chunks


def cases() -> list[tuple[list[int], int, bool]]:
    """Slabs, columns, paired: ragged in rows and in columns, and some random ones."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    fixed = [
        ([16], 256, False),
        ([1], 64, False),
        ([100, 96], 2176, False),
        ([2, 46, 17, 33], 704, False),
        ([6, 16, 46, 30], 320, True),
    ]
    return fixed + [
        ([rng.randint(1, 90) * (1 + paired) for _ in range(rng.randint(1, 5))], 64 * rng.randint(1, 40), bool(paired))
        for paired in (0, 1, 0, 1)
    ]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_packed_as_described(kind: str) -> None:
    for slabs, num_cols, paired in cases():
        given = np.random.default_rng(3).integers(0, 1 << 16, (sum(slabs), num_cols - 5 * paired)).astype(np.uint16)
        rows, ends = np.zeros((len(given), num_cols), np.uint16), np.cumsum(slabs)
        rows[:, : given.shape[1]] = given
        want = np.concatenate(
            [c for n, e in zip(slabs, ends, strict=True) for c in packed_slowly(rows[e - n : e], paired)]
        )
        if kind == "numpy":
            got = pack_rows(given, slabs, paired)
        else:
            got = pack_rows(torch.from_numpy(given.view(np.int16)), slabs, paired).numpy().view(np.uint16)
        assert got.shape == rows.shape
        wrong = np.flatnonzero(got.reshape(-1) != want)
        assert not wrong.size, (
            f"{kind}: slabs {slabs} x {num_cols}, paired {paired}: differs from element {wrong[0]} on"
        )
