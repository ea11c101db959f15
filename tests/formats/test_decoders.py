"""What the host decodes of packed rows, in any range of columns, against the values of an independent oracle."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.gguf_files import SCALES, random_blocks

from distmk.backends.host.build import load_runtime
from distmk.formats import FORMATS, QuantizedRows, WeightFormat
from distmk.formats.e4m3 import E4m3, e4m3_codes, e4m3_values
from distmk.formats.gguf_blocks import GgufBlocks
from distmk.formats.int4_groups import Int4Groups

F32 = npt.NDArray[np.float32]
PACKED = [found for found in FORMATS.values() if found.is_quantized]
NUM_ROWS = 5


def random_rows(found: type[WeightFormat], num_cols: int, rng: np.random.Generator) -> tuple[QuantizedRows, F32]:
    """Rows of any codes, and their values: of FP8 by torch, of GGUF's blocks by its package, else by the formula."""
    if issubclass(found, GgufBlocks):
        kind = gguf.GGMLQuantizationType[found.kind]
        blocks = random_blocks((NUM_ROWS, num_cols), kind, rng)
        return QuantizedRows.of_blocks(blocks), gguf.dequantize(blocks, kind)
    codes = rng.integers(0, 16 if issubclass(found, Int4Groups) else 256, (NUM_ROWS, num_cols)).astype(np.uint8)
    groups = 1 if found.name == "fp8" else -(-num_cols // found.group_cols)
    scales = rng.uniform(-0.1, 0.1, (NUM_ROWS, groups)).astype(np.float32)
    by_col = np.repeat(scales, num_cols if groups == 1 else found.group_cols, 1)[:, :num_cols]
    if issubclass(found, E4m3):
        codes[codes & 127 == 127] = 0  # NaN
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        return QuantizedRows(codes, scales, np.empty((NUM_ROWS, 0), np.uint8)), values * by_col
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
    by_zero = np.repeat(zeros, found.group_cols, 1)[:, :num_cols].astype(np.float32)
    return QuantizedRows(codes, scales, zeros), (codes - by_zero) * by_col


@pytest.mark.parametrize("found", PACKED, ids=lambda found: found.name)
def test_decodes(found: type[WeightFormat]) -> None:
    runtime, rng = load_runtime(), np.random.default_rng()
    for _ in range(4):
        num_cols = int(rng.integers(1, 700))
        if issubclass(found, GgufBlocks):
            num_cols = -(-num_cols // found.group_cols) * found.group_cols
        rows, want = random_rows(found, num_cols, rng)
        largest = np.abs(want).max()
        assert np.allclose(found.values(rows), want, rtol=1e-6, atol=1e-6 * largest)
        stored = np.ascontiguousarray(found.pack_rows(rows))
        assert stored.nbytes == found.slab_bytes(NUM_ROWS, num_cols, tiled=False)
        for begin, end in [(0, num_cols), *(sorted(rng.integers(0, num_cols + 1, 2)) for _ in range(8))]:
            got = np.full((NUM_ROWS, end - begin), np.nan, np.float32)
            for row in range(NUM_ROWS):
                runtime.distmk_decode_row(
                    ctypes.c_uint32(found.id),
                    stored[row].ctypes.data_as(ctypes.c_void_p),
                    *(ctypes.c_uint32(int(number)) for number in (num_cols, begin, end)),
                    got[row].ctypes.data_as(ctypes.c_void_p),
                )
            wrong = np.argwhere(np.abs(got - want[:, begin:end]) > 1e-6 * largest)
            assert not len(wrong), f"{num_cols} columns, {begin} to {end}: wrong at {wrong[0]}"


def test_every_type_of_gguf_is_drawn() -> None:
    kinds = {found.kind for found in PACKED if issubclass(found, GgufBlocks)}
    assert kinds <= {kind.name for kind in SCALES}


def test_e4m3_is_that_of_torch() -> None:
    rng = np.random.default_rng()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), every, equal_nan=True)
    values = rng.standard_normal(100_000) * np.exp(rng.uniform(-9, 5, 100_000))
    halves = (every[1:127] + every[:126]) / 2  # ties
    given = np.concatenate([np.clip(values, -448, 448), halves, -halves, [0.0, -0.0, 448, -448]]).astype(np.float32)
    want = torch.from_numpy(given).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_codes(given), want)
