"""Communication between ranks: a put, and the sum of the blocks that an all-reduce has pushed."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_ROWS, N_TILE, InputNormArgs
from distmk.errors import UsageError
from distmk.graph.regions import ITEM_BYTES, Region, Slab
from distmk.graph.task import (
    Access,
    EarlyCompletion,
    Layout,
    Task,
    Values,
    access,
    batch_access,
    f32_access,
    require,
    rows_of,
    task_type,
    vector_accesses,
)
from distmk.tasks.elementwise import check_same_cols
from distmk.tasks.input_norm import encode_input_norm, input_norm_accesses


class PutArgs(ctypes.Structure):
    _fields_ = [
        ("src", c_uint64),
        ("dst", c_uint64),
        ("num_bytes", c_uint64),  # with a batch: of a row
        ("dst_rank", c_uint32),
        ("pad", c_uint32),
        ("batch", c_uint64),  # 0: none
    ]


@task_type(1, "put")
@dataclass(frozen=True, eq=False)
class Put(Task):
    """Copy `src` on this rank to `dst` on any rank.

    To a peer: one putmem_signal, the data and then the triggers of that rank.

    batch: the regions are whole buffers of MAX_ROWS rows, and the rows of the batch are copied. Without a batch the
    regions have one row.

    Raises UsageError if the regions differ in columns or dtype, or do not have that shape.
    """

    src: Region = None  # type: ignore[assignment]
    dst: Region = None  # type: ignore[assignment]
    batch: Region | None = None

    Args: ClassVar[type[ctypes.Structure]] = PutArgs

    def __post_init__(self) -> None:
        if not self.batch:
            check_same_cols(self.src, self.dst)
            return
        if not isinstance(self.src, Region) or not isinstance(self.dst, Region):
            return  # Graph.add reports it
        shapes = {(each.buffer.rows, each.buffer.cols, each.cols, each.buffer.dtype) for each in (self.src, self.dst)}
        rows, whole, cols, _ = shapes.pop()
        if shapes or rows != MAX_ROWS or cols != whole:
            raise UsageError(
                f"{self.src} and {self.dst} must be whole buffers of {MAX_ROWS} rows, the same size and dtype"
            )

    def dtypes(self) -> Mapping[str, str | None]:
        return {"src": None, "dst": None}

    def reads(self) -> Iterable[Region]:
        return filter(None, (self.src, self.batch))

    def writes(self) -> Iterable[Region]:
        return (self.dst,)

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num_bytes": self.src.cols * ITEM_BYTES[self.src.buffer.dtype], "dst_rank": self.dst.rank}

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        if self.batch:
            return super().oracle(values)
        return {self.dst: values[self.src]}

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        num_bytes = args.num_bytes * rows_of(args.batch)
        accesses = [access(False, rank, args.src, num_bytes), access(True, args.dst_rank, args.dst, num_bytes)]
        return [*accesses, batch_access(rank, args.batch)] if args.batch else accesses


class SumArgs(ctypes.Structure):
    _fields_ = [
        ("blocks", c_uint64),
        ("dst", c_uint64),
        ("out_bf16", c_uint64),  # bf16 columns of every row, dst rounded; 0: none
        ("lamport_reset", c_uint64),  # columns to be reset, laid out as `out_bf16`; 0: none
        ("batch", c_uint64),
        ("block_stride", c_uint64),  # bytes from one block to the next
        ("num_blocks", c_uint32),
        ("num_cols", c_uint32),  # columns of a block
        ("dst_stride", c_uint32),  # elements from one row of dst to the next
        ("out_bf16_stride", c_uint32),
        ("accumulates", c_uint32),  # 1: add to dst
        ("polls_blocks", c_uint32),  # 1: poll the blocks, and reset them
        ("block_gap", c_uint32),  # elements between the rows of a block
        ("pad", c_uint32),
        ("input_norm", InputNormArgs),  # host only
    ]


@task_type(3, "sum")
@dataclass(frozen=True, eq=False)
class Sum(Task):
    """dst (+)= blocks[0] + blocks[1] + ... in that order, float32: the reducing half of an all-reduce.

    A block is f32 [rows, columns of dst] without gaps in a buffer of one row, as Epilogue.PUSH writes it, or it is
    columns of every row. Blocks are equally spaced. dst: f32 columns of every row. out_bf16: the same columns rounded
    to bf16, for tasks that multiply them. lamport_reset: see `Linear`. input_norm, squares: see `ScaledLinear`; GPUs ignore
    them.

    polls_blocks: the blocks are in a Lamport buffer (`Buffer.lamport`). The task polls for non-zero elements before its waits
    are met, and resets them. PUSH writes zeros as negative zeros, which do not change the sum. Between two sums one
    task pushes each block, and this task waits for nothing else.
    """

    blocks: tuple[Region, ...] = ()
    dst: Region = None  # type: ignore[assignment]
    out_bf16: Region | None = None
    lamport_reset: Region | None = None
    batch: Region | None = None
    accumulates: bool = False
    polls_blocks: bool = False
    input_norm: Slab | None = None
    squares: Region | None = None

    Args: ClassVar[type[ctypes.Structure]] = SumArgs
    polls_inputs: ClassVar[bool] = True
    resets_rows: ClassVar[bool] = True
    completes_early: ClassVar[EarlyCompletion | None] = EarlyCompletion("polls_blocks", N_TILE)
    hot_variants: ClassVar[int] = 1

    def dtypes(self) -> Mapping[str, str | None]:
        return {"blocks": "f32", "dst": "f32", "out_bf16": "bf16", "lamport_reset": "bf16", "squares": "f32"}

    def reads(self) -> Iterable[Region]:
        yield from self.blocks
        if self.accumulates:
            yield self.dst
        if self.batch:
            yield self.batch

    def writes(self) -> Iterable[Region]:
        yield from filter(None, (self.dst, self.out_bf16, self.lamport_reset, self.squares))
        if self.polls_blocks:
            yield from self.blocks

    def derived(self, layout: Layout) -> dict[str, Any]:
        buffer, begins = (self.blocks[0].buffer, [layout.operand(block) for block in self.blocks])
        strides = {after - before for before, after in itertools.pairwise(begins)} or {0}
        shapes = {(block.buffer.rows, block.buffer.cols) for block in self.blocks}
        if len(strides) > 1 or (len(shapes) > 1 and buffer.rows > 1):
            raise UsageError(f"task {self.op}: its blocks must have the same shape and be equally spaced in memory")
        return {
            "blocks": begins[0],
            "block_stride": strides.pop(),
            "num_blocks": len(self.blocks),
            "num_cols": self.dst.cols,
            "dst_stride": self.dst.buffer.cols,
            "out_bf16_stride": self.out_bf16.buffer.cols if self.out_bf16 else 0,
            "block_gap": buffer.cols - self.dst.cols if buffer.rows > 1 else 0,
            "input_norm": encode_input_norm(layout, self.input_norm, self.squares),
        }

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        if self.batch or self.polls_blocks or self.lamport_reset or self.squares:
            return super().oracle(values)
        total = values[self.dst] if self.accumulates else 0
        for block in self.blocks:
            total = total + values[block]
        return dict.fromkeys(self.writes(), total)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.num_blocks > 0, "there are no blocks")
        require(args.accumulates <= 1 and args.polls_blocks <= 1, "a flag is neither 0 nor 1")
        require(bool(args.out_bf16 or not args.lamport_reset), "there is no out_bf16 to reset")
        rows = rows_of(args.batch)
        blocks = [
            f32_access(
                False, rank, args.blocks + b * args.block_stride, args.num_cols, rows, args.num_cols + args.block_gap
            )
            for b in range(args.num_blocks)
        ]
        accesses = [block._replace(early=bool(args.polls_blocks)) for block in blocks]
        if args.polls_blocks:
            accesses += [block._replace(write=True, clears=True) for block in blocks]
        dst = f32_access(True, rank, args.dst, args.num_cols, rows, args.dst_stride)
        accesses.append(dst)
        if args.accumulates:
            accesses.append(dst._replace(write=False, early=bool(args.polls_blocks)))
        if args.out_bf16:
            accesses += vector_accesses(
                rank, args.out_bf16, args.lamport_reset, args.num_cols, rows, args.out_bf16_stride
            )
        accesses += input_norm_accesses(args, rank, args.num_cols)
        if args.batch:
            accesses.append(batch_access(rank, args.batch))
        return accesses
