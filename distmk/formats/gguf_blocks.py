"""Blocks of GGUF files, stored as in the file: the structs of ggml-common.h in llama.cpp.

The gguf package decodes them in Python.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from distmk.formats.weight_format import U8, QuantizedRows, WeightFormat
from distmk.model.bf16 import F32


class GgufBlocks(WeightFormat):
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
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        return num_rows * (num_cols // cls.group_cols * cls.block_bytes)

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
