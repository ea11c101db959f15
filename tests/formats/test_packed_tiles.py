"""Packed tiles, read byte by byte as their layout is described, against the values of the rows that were packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.bodies.packed_linear import random_rows

from distmk.formats import QuantizedRows
from distmk.formats.e4m3 import e4m3_values
from distmk.formats.packed_tiles import PackedTiles
from distmk.formats.weight_format import U8
from distmk.model.bf16 import f32_to_bf16
from distmk.tasks.packed_linear import GPU_FORMATS

F32 = npt.NDArray[np.float32]


class Place(NamedTuple):
    """A column of a row of a tile. words: of the row's lane; col: of the lane's eight columns of every 32."""

    words: npt.NDArray[np.uint32]
    lane: int
    group_of_32: int
    col: int
    scales: U8  # of the tile
    row: int


def e4m3_at(place: Place) -> float:
    word = int(place.words[2 * place.group_of_32 + place.col // 4])
    half = word >> 16 * (place.col % 2) & 0xFFFF
    if place.col % 4 < 2:
        code = half >> 8 & 0x80 | half >> 4 & 0x7F
    else:
        code = half >> 4 & 0x80 | half & 0x0F | half >> 8 & 0x70
    return float(e4m3_values()[code])


def section(place: Place, begin: int, dtype: str, count: int) -> npt.NDArray[np.float32]:
    """A row's numbers in a section of the tile's scales: rows g and g + 8 are side by side."""
    size = np.dtype(dtype).itemsize * count
    at = begin + (place.row % 8 * 2 + place.row // 8) * size
    return place.scales[at : at + size].view(dtype).astype(np.float32)


def lane_section(place: Place, num_words: int) -> list[int]:
    """The words of a row's lane in the section that begins a tile's scales."""
    at = (8 * (place.row % 8) + 2 * place.lane + place.row // 8) * 4 * num_words
    return [int(word) for word in place.scales[at : at + 4 * num_words].view(np.uint32)]


def bits_at(word: int, num_bits: int, pair: int, col: int) -> int:
    """Of the pairs in a word, the column's bits."""
    return word >> num_bits * pair + 16 * (col % 2) & (1 << num_bits) - 1


def nibble_at(place: Place) -> int:
    return bits_at(int(place.words[place.group_of_32]), 4, place.col // 2, place.col)


def fp8_block_at(place: Place) -> float:
    return e4m3_at(place) * float(section(place, 0, "<f4", 2)[place.group_of_32 // 4])


def int4_at(place: Place) -> float:
    code = int(place.words[place.group_of_32]) >> 16 * (place.col % 2) + 4 * (place.col // 2) & 15
    group = place.group_of_32 // 4
    return (code - float(section(place, 64, "u1", 2)[group])) * float(section(place, 0, "<f2", 2)[group])


def f32_at(place: Place, begin: int, dtype: str, count: int, i: int) -> np.float32:
    return np.float32(section(place, begin, dtype, count)[i])


def q8_0_at(place: Place) -> float:
    word = int(place.words[2 * place.group_of_32 + place.col // 4])
    code = (word >> 16 * (place.col % 2) + 8 * (place.col // 2 % 2) & 0xFF ^ 0x80) - 128
    return float(np.float32(code) * f32_at(place, 0, "<f2", 8, place.group_of_32))


def super_block_at(place: Place, code: int, begin: int) -> float:
    """d * scale * code - dmin * minimum, as the gguf package rounds it."""
    scale, minimum = (f32_at(place, at, "u1", 8, place.group_of_32) for at in (begin, begin + 128))
    d, d_min = (f32_at(place, begin + 256, "<f2", 2, i) for i in range(2))
    return float(d * scale * np.float32(code) - d_min * minimum)


def q4_k_at(place: Place) -> float:
    return super_block_at(place, nibble_at(place), 0)


def q6_k_at(place: Place) -> float:
    high = int(place.words[8 + place.group_of_32 // 2])
    code = nibble_at(place) | bits_at(high, 2, 4 * (place.group_of_32 % 2) + place.col // 2, place.col) << 4
    scale = f32_at(place, 0, "i1", 16, 2 * place.group_of_32 + place.col // 4)
    return float(f32_at(place, 256, "<f2", 1, 0) * scale * np.float32(code - 32))


def five_bits_at(place: Place) -> int:
    high = lane_section(place, 2)[place.group_of_32 // 4]
    return nibble_at(place) | bits_at(high, 1, 4 * (place.group_of_32 % 4) + place.col // 2, place.col) << 4


def q5_k_at(place: Place) -> float:
    return super_block_at(place, five_bits_at(place), 512)


def scaled_at(place: Place, code: int, begin: int) -> np.float32:
    return np.float32(code) * f32_at(place, begin, "<f2", 8, place.group_of_32)


def q4_0_at(place: Place) -> float:
    return float(scaled_at(place, nibble_at(place) - 8, 0))


def q4_1_at(place: Place) -> float:
    return float(scaled_at(place, nibble_at(place), 0) + scaled_at(place, 1, 256))


def q5_0_at(place: Place) -> float:
    return float(scaled_at(place, five_bits_at(place) - 16, 512))


def q5_1_at(place: Place) -> float:
    return float(scaled_at(place, five_bits_at(place), 512) + scaled_at(place, 1, 768))


READERS: dict[str, Callable[[Place], float]] = {
    "fp8": e4m3_at,
    "fp8_block": fp8_block_at,
    "int4": int4_at,
    "q8_0": q8_0_at,
    "q4_k": q4_k_at,
    "q6_k": q6_k_at,
    "q5_k": q5_k_at,
    "q4_0": q4_0_at,
    "q4_1": q4_1_at,
    "q5_0": q5_0_at,
    "q5_1": q5_1_at,
}
IN_HALVES = ("q6_k",)
"""Formats whose lanes have four columns of every 16."""


def unpacked(found: type[PackedTiles], stream: U8, num_rows: int, num_cols: int, row_bytes: int, scales: int) -> F32:
    """The values in a slab's stream of `num_rows` rows, in the order in which they are packed."""
    num_tiles, at = -(-num_cols // 256), 0
    values = np.empty((num_rows, num_tiles * 256), np.float32)
    for m_block in range(0, num_rows, 64):
        for k_block in range(0, num_tiles, 8):
            for m in range(m_block, min(m_block + 64, num_rows), 16):
                for k in range(k_block, min(k_block + 8, num_tiles)):
                    tile_rows = min(16, num_rows - m)
                    tile = stream[at : at + scales + tile_rows * row_bytes]
                    at += len(tile)
                    for row in range(tile_rows):
                        codes = tile[scales + row * row_bytes :][:row_bytes].reshape(-1, 4, 16)
                        if len(codes) % 2 == 0:
                            codes = codes[np.arange(len(codes)) ^ row % 2]
                        for lane in range(4):
                            words = np.ascontiguousarray(codes[:, lane]).reshape(-1).view(np.uint32)
                            for group, col in np.ndindex(8, 8):
                                place = Place(words, lane, group, col, tile[:scales], row)
                                in_group = lane * 8 + col
                                if found.name in IN_HALVES:
                                    in_group = 16 * (col // 4) + 4 * (0, 2, 1, 3)[lane] + col % 4
                                column = k * 256 + group * 32 + in_group
                                values[m + row, column] = READERS[found.name](place)
    if found.name == "fp8":
        values *= stream[at : at + 4 * num_rows].view(np.float32)[:, None]
        at += -(-num_rows // 4) * 16
    assert at == len(stream)
    return values[:, :num_cols]


def pair_order(num_rows: int) -> list[int]:
    half = num_rows // 2
    pieces = [range(at, min(at + 8, half)) for at in range(0, half, 8)]
    return [row + part for piece in pieces for part in (0, half) for row in piece]


def drawn_cols(found: type[PackedTiles], rng: np.random.Generator, *others: int) -> int:
    num_cols = int(rng.choice([100, 256, 2100, *others]))
    return num_cols if found.takes(num_cols) else -(-num_cols // found.group_cols) * found.group_cols


@pytest.mark.parametrize("found", GPU_FORMATS, ids=lambda found: found.name)
def test_packed_as_described(found: type[PackedTiles]) -> None:
    rng = np.random.default_rng()
    row_bytes, scales = found.tile_row_bytes(), found.tile_scale_bytes
    for paired in (False, True):
        slabs = [int(n) * (1 + paired) for n in rng.choice([1, 3, 8, 17, 30, 33], 2)]
        num_cols = drawn_cols(found, rng, 576)
        rows, _ = random_rows(found, sum(slabs), num_cols, rng)
        stream = found.pack(rows, slabs, paired)
        values, at, first = found.values(rows), 0, 0
        for slab in slabs:
            num_bytes = found.slab_bytes(slab, num_cols, tiled=True)
            order = pair_order(slab) if paired else list(range(slab))
            part = stream[at : at + num_bytes]
            want = values[first : first + slab][order]
            got = unpacked(found, part, slab, num_cols, row_bytes, scales)
            wrong = np.argwhere(got != want)
            assert not len(wrong), f"slabs {slabs} of {num_cols} columns, paired {paired}: wrong at {wrong[0]}"
            # A bit that is wrong changes values: of a code in front, of a scale behind.
            broken = part.copy()
            broken[scales + int(rng.integers(64 * min(slab, 16)))] ^= 0x10
            assert (unpacked(found, broken, slab, num_cols, row_bytes, scales) != want).any() or num_cols < 256
            at, first = at + num_bytes, first + slab
        assert at == stream.nbytes


@pytest.mark.parametrize("found", GPU_FORMATS, ids=lambda found: found.name)
def test_tensors_as_arrays(found: type[PackedTiles]) -> None:
    """Quantized and packed as tensors, rows have the same bytes."""
    rng, slabs = np.random.default_rng(), [30, 8]
    num_cols = drawn_cols(found, rng)
    rows, _ = random_rows(found, sum(slabs), num_cols, rng)
    if found.quantizes:
        values = rng.standard_normal((sum(slabs), num_cols)) * rng.choice([0, 1e-9, 1, 1e9], (sum(slabs), 1))
        bits = f32_to_bf16(values.astype(np.float32))
        rows = found.quantize(bits)
        for got, want in zip(found.quantize(torch.from_numpy(bits.view(np.int16))), rows, strict=True):
            assert np.array_equal(got.numpy(), want)
    tensors = QuantizedRows(*(torch.from_numpy(array) for array in rows))
    assert np.array_equal(found.pack(tensors, slabs, True).numpy(), found.pack(rows, slabs, True))


def test_every_format_is_read() -> None:
    assert {found.name for found in GPU_FORMATS} == set(READERS)
