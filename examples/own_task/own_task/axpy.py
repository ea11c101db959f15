"""y += a * x as a task: its operands, and what the rest of distmk needs to know about them. The bodies are beside this file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

import distmk
from distmk.tasks import Access, Layout, Region, Task, Values, access


class AxpyArgs(ctypes.Structure):
    """The arguments of the bodies: the same struct in C++. Operands are 64-bit addresses, the same for every rank."""

    _fields_ = [
        ("x", c_uint64),
        ("y", c_uint64),
        ("copy", c_uint64),  # 0: none
        ("num", c_uint32),
        ("copy_rank", c_uint32),
        ("a", c_float),
    ]


@distmk.register("axpy", host="axpy.cpp", device="axpy.cuh")
@dataclass(frozen=True, eq=False, kw_only=True)
class Axpy(Task):
    """y += a * x, float32 [n]. copy: a region on another rank that also gets the new y, by one putmem_signal."""

    x: Region
    y: Region
    copy: Region | None = None
    a: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = AxpyArgs

    def __post_init__(self) -> None:
        if len({region.cols for region in (self.x, self.y, self.copy) if region}) > 1:
            raise distmk.UsageError(f"task {self.op}: x, y and copy must have the same number of columns")
        if self.copy and self.copy.rank == self.rank:
            raise distmk.UsageError(f"task {self.op}: copy must be on another rank; add a distmk.tasks.Put instead")

    def dtypes(self) -> Mapping[str, str | None]:
        return {"x": "f32", "y": "f32", "copy": "f32"}

    # Waits follow from what tasks read and write.

    def reads(self) -> Iterable[Region]:
        return (self.x, self.y)

    def writes(self) -> Iterable[Region]:
        return filter(None, (self.y, self.copy))

    def encode(self, layout: Layout) -> ctypes.Structure:
        return AxpyArgs(
            x=layout.operand(self.x),
            y=layout.operand(self.y),
            copy=layout.operand(self.copy),
            num=self.x.cols,
            copy_rank=self.copy.rank if self.copy else 0,
            a=self.a,
        )

    # `distmk.check` proves a program from its bytes alone, so the accesses follow from the arguments.

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        def f32(is_write: bool, on: int, operand: int) -> Access:
            return access(is_write, on, operand, 4 * args.num)

        found = [f32(False, rank, args.x), f32(False, rank, args.y), f32(True, rank, args.y)]
        return [*found, f32(True, args.copy_rank, args.copy)] if args.copy else found

    # `distmk.testing` compares the bodies with this oracle.

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        total = values[self.y].double() + self.a * values[self.x].double()
        return {region: total for region in self.writes()}
