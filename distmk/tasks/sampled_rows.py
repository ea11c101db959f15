"""Tasks for the sampled rows of a job iteration: one gathers the rows before the head, one finds their best logits after it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import MAX_ROWS
from distmk.graph.regions import Region
from distmk.graph.task import Access, Layout, access, f32_access, require, task_type
from distmk.tasks.activations import JobTask, RowSet, activation_access, check_batch, job_batch_accesses
from distmk.tasks.scheduling import candidates_bytes
from distmk.tasks.slots import check_num_rows, check_row_capacity


class SelectRowsArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # activations of k columns
        ("out", c_uint64),  # activations of k columns, whose first num_rows rows are in use
        ("batch", c_uint64),
        ("k", c_uint32),
        ("tiled", c_uint32),  # an ActivationLayout
        ("num_rows", c_uint32),
        ("pad", c_uint32),
    ]


@task_type(20, "select_rows")
@dataclass(frozen=True, eq=False)
class SelectRows(JobTask):
    """out[i] = x[i-th sampled row of the job iteration], for up to `num_rows` sampled rows. An instance is a sampled row."""

    x: Region = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    k: int = 0
    num_rows: int = MAX_ROWS
    tiled: int = 0  # an ActivationLayout
    rows: RowSet = RowSet.SAMPLED

    Args: ClassVar[type[ctypes.Structure]] = SelectRowsArgs

    def dtypes(self) -> Mapping[str, str | None]:
        return {"x": "bf16", "out": "bf16", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.x, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.out,)

    def max_instances(self) -> int:
        return self.num_rows

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(args.num_rows)

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_row_capacity(args.num_rows, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_batch(args)
        check_num_rows(args.num_rows)
        require(args.x != args.out, "x is the output")
        return [
            activation_access(False, rank, args.x, args.k, args.tiled),
            activation_access(True, rank, args.out, args.k, args.tiled, args.num_rows),
            *job_batch_accesses(rank, args.batch),
        ]


class ArgmaxRowsArgs(ctypes.Structure):
    _fields_ = [
        ("logits", c_uint64),  # f32 [num_rows, stride]; this rank has n of its columns
        ("out", c_uint64),  # Candidate [num_parts, num_rows]
        ("batch", c_uint64),
        ("num_cols", c_uint32),
        ("stride", c_uint32),
        ("num_parts", c_uint32),
        ("first_token", c_uint32),
        ("num_rows", c_uint32),
        ("pad", c_uint32),
    ]


@task_type(21, "argmax_rows")
@dataclass(frozen=True, eq=False)
class ArgmaxRows(JobTask):
    """out[p, row] = the best logit of every sampled row in part p of the columns, and its token (the lowest id wins ties).

    logits: f32 columns, with a row for each row that may be sampled. out: Candidate [parts, rows]. Part p is instance p
    and begins at column num_cols * p // parts.
    """

    logits: Region = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    first_token: int = 0
    rows: RowSet = RowSet.SAMPLED

    Args: ClassVar[type[ctypes.Structure]] = ArgmaxRowsArgs

    def dtypes(self) -> Mapping[str, str | None]:
        return {"logits": "f32", "out": "u8", "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.logits, self.batch)

    def writes(self) -> Iterable[Region]:
        return (self.out,)

    @property
    def num_parts(self) -> int:
        return self.out.cols // candidates_bytes(self.logits.buffer.rows)

    def max_instances(self) -> int:
        return self.num_parts

    def derived(self, layout: Layout) -> dict[str, Any]:
        return {"num_cols": self.logits.cols, "stride": self.logits.buffer.cols, "num_rows": self.logits.buffer.rows}

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(args.num_parts)

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        check_row_capacity(args.num_rows, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        check_batch(args)
        require(args.num_parts > 0, "there are no parts")
        check_num_rows(args.num_rows)
        return [
            f32_access(False, rank, args.logits, args.num_cols, args.num_rows, args.stride),
            access(True, rank, args.out, candidates_bytes(args.num_rows) * args.num_parts),
            *job_batch_accesses(rank, args.batch),
        ]
