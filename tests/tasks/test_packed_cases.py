"""The cases of packed weights find a wrong bit: with one in every code of a tile, the product on the emulator is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from support.bodies import linear
from support.bodies.board import Board
from support.bodies.packed_linear import product_of

import distmk
from distmk.abi import Epilogue
from distmk.formats.packed_tiles import PackedTiles
from distmk.tasks.packed_linear import GPU_FORMATS


@pytest.mark.parametrize("found", GPU_FORMATS, ids=lambda found: found.name)
def test_a_wrong_bit_is_found(found: type[PackedTiles]) -> None:
    board = Board(np.random.default_rng(), num_ranks=1, num_workers=2, gpu_layout=True)
    for _ in range(2):
        linear.columns(board, 0, 4e-6, Epilogue.STORE, 300, 20, 3, product_of(found))
    (weight, _) = [each for each in board.graph.weights if each.format is found]
    assert weight.data is not None
    codes = weight.data[found.tile_scale_bytes : found.tile_scale_bytes + 16 * found.tile_row_bytes()]
    codes ^= np.uint8(0x10)
    with distmk.connect() as bootstrap, distmk.Session(board.compile(), bootstrap, backend="emulated") as session:
        wrong, right = [each.error for each in board.run(session) if each.kind == "packed_linear STORE"]
    assert wrong and not right
