"""Blocks of GGUF files, on the host stored as in the file: the structs of ggml-common.h in llama.cpp.

The gguf package decodes them in Python. In tiles, codes and scales have other places but the same values.
A scale of six bits takes a byte there, so a super-block of Q4_K or Q5_K takes four bytes more. Products differ from those of
the values by the rounding of float32 sums; minima are multiplied by sums of activations of which 16 bits are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from distmk.abi import K_TILE
from distmk.formats.arrays import as_indices, contiguous, library, viewed, zeros
from distmk.formats.lane_words import packed_pairs
from distmk.formats.packed_tiles import LANES, PackedTiles
from distmk.formats.weight_format import U8, QuantizedRows
from distmk.model.bf16 import F32


class GgufBlocks(PackedTiles):
    """A block has `group_cols` columns of a row. Scales are among the codes.

    kind: the type's name in GGUF.
    block_bytes: of a block.
    half_offsets: the bytes of a block at which its float16 scales begin.
    """

    kind: ClassVar[str]
    block_bytes: ClassVar[int]
    half_offsets: ClassVar[tuple[int, ...]]
    may_be_bf16 = True

    @classmethod
    def takes(cls, num_cols: int) -> bool:
        return num_cols % cls.group_cols == 0

    @classmethod
    def rows_bytes(cls, num_rows: int, num_cols: int) -> int:
        return num_rows * (num_cols // cls.group_cols * cls.block_bytes)

    @classmethod
    def num_cols(cls, rows: QuantizedRows) -> int:
        return int(rows.codes.shape[1]) // cls.block_bytes * cls.group_cols

    @classmethod
    def codes_of(cls, rows: QuantizedRows) -> Any:
        return cls.block_codes(cls.blocks_of(rows)).reshape(len(rows.codes), -1)

    @classmethod
    def blocks_of(cls, rows: QuantizedRows) -> Any:
        """The bytes of each block, uint8 [n, blocks, block_bytes]."""
        return contiguous(rows.codes).reshape(len(rows.codes), -1, cls.block_bytes)

    @classmethod
    def block_codes(cls, blocks: Any) -> Any:
        """One code a byte, [n, blocks, group_cols]."""
        raise NotImplementedError(f"{cls.name} has no tiles")

    @classmethod
    def block_sections(cls, blocks: Any) -> Sequence[Any]:
        """The bytes of each section of scales that a block has, [n, blocks, bytes]."""
        raise NotImplementedError(f"{cls.name} has no tiles")

    @classmethod
    def scale_sections(cls, rows: QuantizedRows, num_k_tiles: int) -> Sequence[Any]:
        blocks, per_tile = cls.blocks_of(rows), K_TILE // cls.group_cols
        sections = [cls._high_bits(rows, num_k_tiles)] if cls.code_bits else []
        for part in cls.block_sections(blocks):
            whole = zeros((len(part), num_k_tiles * per_tile, part.shape[2]), "uint8", part)
            whole[:, : part.shape[1]] = part
            sections.append(whole.reshape(len(part), num_k_tiles, 1, -1))
        return sections

    @classmethod
    def _high_bits(cls, rows: QuantizedRows, num_k_tiles: int) -> Any:
        """The bits of codes behind the lowest `code_bits`, a section with bytes for each lane."""
        codes = cls.codes_of(rows)
        whole = zeros((len(codes), num_k_tiles * K_TILE), "uint8", codes)
        whole[:, : codes.shape[1]] = codes >> 4
        return viewed(packed_pairs(whole.reshape(len(codes), num_k_tiles, -1, LANES, 8), 1), "uint8")

    @classmethod
    def lane_words(cls, codes: Any) -> Any:
        return packed_pairs(codes, 4)

    @classmethod
    def cut(cls, rows: QuantizedRows, begin: int, end: int) -> QuantizedRows:
        first, last = (col // cls.group_cols * cls.block_bytes for col in (begin, end))
        return QuantizedRows.of_blocks(rows.codes[:, first:last])

    @classmethod
    def values(cls, rows: QuantizedRows) -> F32:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        blocks = np.ascontiguousarray(rows.codes)
        return np.asarray(dequantize(blocks, GGMLQuantizationType[cls.kind]), np.float32)

    @classmethod
    def pack_rows(cls, rows: QuantizedRows) -> U8:
        return np.ascontiguousarray(rows.codes)

    @classmethod
    def scales_of(cls, rows: QuantizedRows) -> F32:
        """The float16 scales of all blocks, float32 [blocks, scales]."""
        blocks = np.ascontiguousarray(rows.codes).reshape(-1, cls.block_bytes)
        halves = [np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2") for at in cls.half_offsets]
        return np.concatenate(halves, 1).astype(np.float32)


def nibbles(packed: Any) -> Any:
    """Of bytes [..., n], the low halves and then the high halves: [..., 2 n]."""
    return library(packed).concatenate([packed & 15, packed >> 4], -1)


def six_bit_scales(packed: Any) -> tuple[Any, Any]:
    """The eight scales and the eight minima of a super-block, a byte each, of the 12 bytes that they are packed in."""
    first, second, third = (packed[..., begin : begin + 4] for begin in (0, 4, 8))
    scales = [first & 63, third & 15 | first >> 6 << 4]
    minima = [second & 63, third >> 4 | second >> 6 << 4]
    found = library(packed)
    return found.concatenate(scales, -1), found.concatenate(minima, -1)


def fifth_bits(packed: Any) -> Any:
    """Of bytes [..., 4], bit i of 32, as the fifth bit of code i: [..., 32]."""
    bits = as_indices(np.arange(8, dtype=np.uint8), packed)
    spread = packed[..., None] >> bits & 1
    return spread.reshape(*packed.shape[:-1], 32) << 4
