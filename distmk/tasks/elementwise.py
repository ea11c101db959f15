"""Simple tasks for users' graphs and for measurements: no work, a linear function, sines."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.errors import UsageError
from distmk.graph.regions import Region
from distmk.graph.task import Access, Layout, Task, Values, access, require, task_type


def check_same_cols(src: Region, dst: Region) -> None:
    """Raise UsageError unless both have one row, the same dtype and the same number of columns."""
    if not isinstance(src, Region) or not isinstance(dst, Region):
        return  # Graph.add reports it
    if src.cols != dst.cols or src.buffer.dtype != dst.buffer.dtype or src.buffer.rows != 1 or dst.buffer.rows != 1:
        raise UsageError(f"{src} and {dst} must be of one row, the same dtype and the same number of columns")


MAX_SINES = 2**20


class NopArgs(ctypes.Structure):
    _fields_ = [("pad", c_uint64)]


@task_type(0, "nop")
@dataclass(frozen=True, eq=False)
class Nop(Task):
    """No work. The task is ordered as if it read `inputs` and wrote `outputs`."""

    inputs: tuple[Region, ...] = ()
    outputs: tuple[Region, ...] = ()

    Args: ClassVar[type[ctypes.Structure]] = NopArgs

    def reads(self) -> Iterable[Region]:
        return self.inputs

    def writes(self) -> Iterable[Region]:
        return self.outputs

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        return []


@dataclass(frozen=True, eq=False)
class _ElementWise(Task):
    """dst = f(src), float32 [n], element by element. `Args` begins with src, dst, num."""

    src: Region = None  # type: ignore[assignment]
    dst: Region = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_same_cols(self.src, self.dst)

    def dtypes(self) -> Mapping[str, str | None]:
        return {"src": "f32", "dst": "f32"}

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num": self.src.cols}

    def reads(self) -> Iterable[Region]:
        return (self.src,)

    def writes(self) -> Iterable[Region]:
        return (self.dst,)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        return [access(False, rank, args.src, 4 * args.num), access(True, rank, args.dst, 4 * args.num)]


class AffineArgs(ctypes.Structure):
    _fields_ = [("src", c_uint64), ("dst", c_uint64), ("num", c_uint32), ("scale", c_float), ("shift", c_float)]


@task_type(2, "affine")
@dataclass(frozen=True, eq=False)
class Affine(_ElementWise):
    """dst = src * scale + shift, float32 [n]."""

    scale: float = 1.0
    shift: float = 0.0

    Args: ClassVar[type[ctypes.Structure]] = AffineArgs

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        return {self.dst: values[self.src] * self.scale + self.shift}


class SineArgs(ctypes.Structure):
    _fields_ = [("src", c_uint64), ("dst", c_uint64), ("num", c_uint32), ("times", c_uint32)]


@task_type(10, "sine")
@dataclass(frozen=True, eq=False)
class Sine(_ElementWise):
    """dst = sin(sin(...src...)) with `times` sines, float32 [n]: work of any length, for measurements."""

    times: int = 1

    Args: ClassVar[type[ctypes.Structure]] = SineArgs

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        result = values[self.src]
        for _ in range(self.times):
            result = result.sin()
        return {self.dst: result}

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        require(args.times <= MAX_SINES, f"there are more than {MAX_SINES} sines, which would look like a hang")
        return super().accesses(args, rank, num_ranks)
