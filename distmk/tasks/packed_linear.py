"""Linear layers whose weights a GPU streams in packed tiles."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.formats import FORMATS
from distmk.formats.packed_tiles import PackedTiles
from distmk.graph.regions import Slab
from distmk.graph.task import CONSTANT, Access, Layout, access, constant_access, require, task_type
from distmk.tasks.linear import Linear

GPU_FORMATS = tuple(found for found in FORMATS.values() if issubclass(found, PackedTiles) and found.runs_on_gpu)
"""Formats of packed tiles, in the order of their numbers."""


class PackedLinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # fields without a comment: see LinearArgs
        ("weight", c_uint64),  # a slab of packed tiles
        ("bias", c_uint64),
        ("out", c_uint64),
        ("out_bf16", c_uint64),
        ("lamport_reset", c_uint64),
        ("fused_partials", c_uint64),
        ("batch", c_uint64),
        ("logits", c_uint64),
        ("norm", c_uint64),  # f32 [k], factors of the columns of x; 0: none
        ("k", c_uint32),
        ("num_features", c_uint32),
        ("x_stride", c_uint32),
        ("out_stride", c_uint32),
        ("out_bf16_stride", c_uint32),
        ("first_token", c_uint32),
        ("logits_stride", c_uint32),
        ("k_pitch", c_uint32),
        ("max_kv_splits", c_uint32),
        ("min_kv_split_len", c_uint32),
        ("kv_split_budget", c_uint32),
        ("window", c_uint32),
        ("fused_combine_len", c_uint32),
        ("eps", c_float),
        ("softcap", c_float),
        ("scale", c_float),  # factor of x @ weight.T
        ("epilogue", c_uint16),
        ("format", c_uint16),
        ("lead", c_uint16),  # columns of a row of the weight before the first column of x
        ("head_dim", c_uint16),
        ("applies_rms", c_uint8),
        ("polls_x", c_uint8),
        ("keeps_logits", c_uint8),
    ]


@task_type(26, "packed_linear")
@dataclass(frozen=True, eq=False)
class PackedLinear(Linear):
    """`Linear` with a slab of packed tiles: out = epilogue(scale * (x * norm) @ slab.T / rms(x) + bias).

    GPUs and the emulator only.

    norm: f32, a factor of each column of x: the weight of an RMSNorm, which cannot be multiplied into packed columns. The
    product with x is rounded to bf16. The rms is that of x itself.
    """

    norm: Slab | None = None
    scale: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = PackedLinearArgs
    hot_variants: ClassVar[int] = 2  # for one N tile, and for two
    takes_packed_weights: ClassVar[bool] = True

    def derived(self, layout: Layout) -> dict[str, Any]:
        return super().derived(layout) | {"norm": layout.operand(self.norm)}

    @classmethod
    def weight_access(cls, args: Any, rank: int, num_rows: int) -> Access:
        found = FORMATS.get(args.format)
        require(found in GPU_FORMATS, "the weight is in no format of packed tiles")
        assert found
        num_bytes = found.slab_bytes(num_rows, args.k_pitch, tiled=True)
        return access(False, rank, args.weight, num_bytes, align_bytes=found.copy_align_bytes, content=CONSTANT)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(math.isfinite(args.scale), "scale is no factor")
        accesses = super().accesses(args, rank, num_ranks)
        require(args.lead + args.k <= args.k_pitch, "rows of the weight are not of k columns")
        return [*accesses, constant_access(rank, args.norm, 4, args.k)] if args.norm else accesses
