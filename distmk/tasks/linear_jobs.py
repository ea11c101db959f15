"""Linear layers of a job iteration."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from ctypes import c_float, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import ACTIVATION_BLOCK_COLS, GATED, K_TILE, MAX_BUCKET_ROWS, MAX_K_SPLITS, ActivationLayout, Epilogue
from distmk.errors import UsageError
from distmk.formats import FORMATS
from distmk.formats.tiles import padded_cols
from distmk.graph.partition import Partition
from distmk.graph.regions import Region, Slab
from distmk.graph.task import (
    CONSTANT,
    ZEROS,
    Access,
    Layout,
    access,
    constant_access,
    f32_access,
    require,
    task_type,
    weight_access,
)
from distmk.model.shards import Range
from distmk.tasks.activations import (
    JobTask,
    RowSet,
    activation_access,
    activation_cols,
    check_batch,
    job_batch_accesses,
    owned_rows,
)
from distmk.tasks.linear import check_pitch
from distmk.tasks.packed_linear import GPU_FORMATS
from distmk.tasks.slots import check_num_rows, check_row_capacity

EPILOGUES = (Epilogue.STORE, Epilogue.PARTS, Epilogue.LOGITS, *GATED)


class LinearJobsArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # activations of k columns (distmk/tasks/activations.py)
        ("weight", c_uint64),  # rows [first_row, end_row) of k_pitch elements in `format`, packed in tiles if `tiled`
        ("bias", c_uint64),  # f32, of the same rows; 0: none
        ("out", c_uint64),
        ("batch", c_uint64),
        ("order", c_uint64),  # see ScaledLinearArgs, host only
        ("k", c_uint32),
        ("k_pitch", c_uint32),  # elements of a row of the weight
        ("num_rows", c_uint32),  # rows of the matrix; the next fields say how its slabs divide them (`Partition`)
        ("num_slabs", c_uint32),
        ("num_reduced", c_uint32),
        ("reduced_rows", c_uint32),
        ("out_stride", c_uint32),  # elements of a row of `out`; gated: columns of the activations
        ("epilogue", c_uint32),  # Epilogue
        ("num_k_splits", c_uint32),  # PARTS: parts of k, each a part of the sum
        ("first_part", c_uint32),  # PARTS: this rank's first one
        ("tiled", c_uint32),
        ("max_sampled_rows", c_uint32),  # maximum of sampled rows, if x has only these; 0: x has all rows
        ("softcap", c_float),  # LOGITS: a logit is stored as softcap * tanh(logit / softcap); 0: unchanged
        ("scale", c_float),  # factor of x @ weight.T, of packed weights and on the host; 0: none
        ("format", c_uint32),  # format of the weight (distmk/formats)
        ("lead", c_uint32),  # columns of a row of the weight before those of x; in tiles, x begins with as many zeros
        ("first_row", c_uint32),  # rows [first_row, end_row) of the matrix are multiplied
        ("end_row", c_uint32),
        ("first_slab", c_uint16),  # the slabs of these rows
        ("end_slab", c_uint16),
        ("out_layout", c_uint32),  # gated: ActivationLayout of `out`
    ]


@task_type(15, "linear_jobs")
@dataclass(frozen=True, eq=False)
class LinearJobs(JobTask):
    """out = epilogue(x @ slab.T + bias) for the rows of a job iteration: bf16 activations, weights of any format,
    float32 sums.

    x: activations (`distmk.tasks.activations`) of all rows or of the sampled rows. slab: the whole matrix of a rank,
    packed in the slabs of a slab program's tasks (`partition`), or in tiles its rows `part` that have one format. Rows
    of gate and up are paired within a slab: in a slab of 2h rows, row i of gate is row i, and row i of up is row h + i.

    Packed tiles (`PackedTiles`) take x as LANE_TILES. If the weight has `lead` columns before those of x, which must
    be whole blocks, the region of x begins with as many columns of zeros.

    out, by epilogue:

    STORE: bf16 [MAX_BUCKET_ROWS, out_stride].
    gated: activations of num_rows / 2 columns.
    LOGITS: f32 [maximum of sampled rows, out_stride].
    PARTS: f32 [owned_rows(num_ranks), parts * num_rows]. Split s of the sum over k goes to columns [(first_part + s) *
      num_rows, ...) on the rank that owns the row. With n rows and R ranks, rank r owns the rows from r * ceil(n / R) on;
      they are the first rows of its buffer.

    out_layout: of gated products; None: as `tiled` says. softcap: see `Linear`. scale: a factor of x @ slab.T that is not
    folded into the matrix, which GPUs have for packed tiles alone. order: see `ScaledLinear`; the host twin alone has it.
    """

    x: Region = None  # type: ignore[assignment]
    slab: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    partition: Partition = None  # type: ignore[assignment]
    bias: Slab | None = None
    epilogue: Epilogue = Epilogue.STORE
    num_k_splits: int = 1
    first_part: int = 0
    num_ranks: int = 1
    tiled: bool = False
    softcap: float = 0.0
    scale: float = 1.0
    order: Slab | None = None
    part: Range | None = None
    out_layout: ActivationLayout | None = None

    Args: ClassVar[type[ctypes.Structure]] = LinearJobsArgs
    has_prologue: ClassVar[bool] = True
    uses_pipeline: ClassVar[bool] = True
    writes_peers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises UsageError if the partition does not fit the matrix."""
        tiling, slabs, (first, last) = self.slab.weight.tiling, self.partition, self._rows()
        fits = slabs.step == 2 and first < last <= slabs.total and last - first == self.slab.rows
        if not fits or (tiling and tiling.slabs != tuple(part_slabs(slabs, first, last)[1])):
            raise UsageError(f"task {self.op}: its partition is not that of the matrix")

    def _rows(self) -> Range:
        """The rows of the matrix that are multiplied."""
        return self.part or (0, self.partition.total)

    def dtypes(self) -> Mapping[str, str | None]:
        out = "bf16" if self.epilogue in (Epilogue.STORE, *GATED) else "f32"
        return {"x": "bf16", "out": out, "batch": None}

    def reads(self) -> Iterable[Region]:
        return (self.x, self.batch)

    def writes(self) -> Iterable[Region]:
        if self.epilogue is Epilogue.PARTS:
            return [self.out.on(rank) for rank in range(self.num_ranks)]
        return (self.out,)

    def weight_bytes(self) -> int:
        return self.slab.num_bytes

    def max_instances(self) -> int:
        return MAX_BUCKET_ROWS * self.slab.rows

    def derived(self, layout: Layout) -> dict[str, Any]:
        n, weight, out = self.slab.rows, self.slab.weight, layout.operand(self.out)
        first, last = self._rows()
        first_slab, slabs = part_slabs(self.partition, first, last)
        return {
            "weight": layout.operand(self.slab),
            "out": out - 4 * self.first_part * n if self.epilogue is Epilogue.PARTS else out,
            "k": weight.cols,
            "k_pitch": weight.pitch,
            "num_rows": self.partition.total,
            "num_slabs": self.partition.num_tasks,
            "num_reduced": self.partition.num_reduced,
            "reduced_rows": self.partition.reduced,
            "out_stride": n // 2 if self.epilogue in GATED else self.out.buffer.cols,
            "max_sampled_rows": self.out.buffer.rows if self.rows is RowSet.SAMPLED else 0,
            "scale": self.scale if self.scale != 1.0 else 0.0,
            "format": weight.format.id,
            "lead": weight.lead,
            "first_row": first,
            "end_row": last,
            "first_slab": first_slab,
            "end_slab": first_slab + len(slabs),
            "out_layout": int(self.tiled) if self.out_layout is None else self.out_layout,
        }

    @classmethod
    def needs_packed_kernel(cls, args: Any) -> bool:
        return _is_packed(args)

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return int(MAX_BUCKET_ROWS * (args.end_row - args.first_row))

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        if args.max_sampled_rows:
            check_row_capacity(args.max_sampled_rows, step)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        _check_linear_jobs(args)
        n = args.end_row - args.first_row
        accesses = [*_x_accesses(args, rank), _weight_access(args, rank, n), *job_batch_accesses(rank, args.batch)]
        accesses += [constant_access(rank, args.bias, 4, n)] if args.bias else []
        accesses += [constant_access(rank, args.order, 4, args.k)] if args.order else []
        if args.epilogue == Epilogue.STORE:
            store = f32_access(True, rank, args.out, n, MAX_BUCKET_ROWS, args.out_stride)
            accesses.append(store._replace(row_bytes=2 * n, stride=2 * args.out_stride, align_bytes=2))
        elif args.epilogue in GATED:
            require(args.out_stride == n // 2, "the output has not as many columns as gate and up have rows")
            require(bool(args.out_layout) == bool(args.tiled), "the output has no layout of this backend")
            accesses.append(activation_access(True, rank, args.out, n // 2, args.out_layout))
        elif args.epilogue == Epilogue.LOGITS:
            accesses.append(f32_access(True, rank, args.out, n, args.max_sampled_rows, args.out_stride))
        else:
            first, rows = args.out + 4 * args.first_part * n, owned_rows(num_ranks)
            accesses += [
                f32_access(True, r, first, n * args.num_k_splits, rows, args.out_stride) for r in range(num_ranks)
            ]
        return accesses


def _check_linear_jobs(args: Any) -> None:
    check_batch(args)
    require(args.epilogue in EPILOGUES, "the epilogue is not one of a product in jobs")
    if args.max_sampled_rows:
        check_num_rows(args.max_sampled_rows)
    require(not args.softcap or args.epilogue == Epilogue.LOGITS, "the epilogue has no logits")
    require(0 <= args.softcap < math.inf, "softcap is no limit")
    is_scaled = bool(args.scale) and args.tiled and not _is_packed(args)
    require(math.isfinite(args.scale) and not is_scaled, "scale is no factor, or one of a matrix that contains it")
    require(bool(args.max_sampled_rows) == (args.epilogue == Epilogue.LOGITS), "logits are those of the sampled rows")
    require(1 <= args.num_k_splits <= MAX_K_SPLITS, "num_k_splits is out of range")
    require(args.num_k_splits == 1 or args.epilogue == Epilogue.PARTS, "the epilogue has no splits")
    check_pitch(args, padded_cols(args.k) if args.tiled else args.k)
    require(args.num_slabs > 0 and args.num_reduced < args.num_slabs, "there are no slabs")
    require(args.num_reduced * args.reduced_rows < args.num_rows, "the reduced slabs have all rows")
    require(args.first_row < args.end_row <= args.num_rows, "the rows are not of the matrix")
    is_whole = args.first_row == 0 and args.end_row == args.num_rows
    require(is_whole or (args.tiled and args.epilogue == Epilogue.STORE), "the epilogue stores a whole matrix")
    first_slab, slabs = part_slabs(_partition(args), args.first_row, args.end_row)
    require((args.first_slab, args.end_slab) == (first_slab, first_slab + len(slabs)), "the slabs are not of the rows")
    require(args.epilogue not in GATED or args.num_rows % 2 == 0, "rows of gate and up are not paired")
    require(args.x != args.out, "x is the output")


def part_slabs(partition: Partition, first: int, last: int) -> tuple[int, list[Range]]:
    """The first slab that has some of the rows [first, last), and these rows by slab, counted from `first`."""
    clipped = [(max(begin, first), min(end, last)) for begin, end in partition.ranges]
    number = next(number for number, (begin, end) in enumerate(clipped) if begin < end)
    return number, [(begin - first, end - first) for begin, end in clipped if begin < end]


def _partition(args: Any) -> Partition:
    return Partition(args.num_rows, args.num_slabs, 2, args.num_reduced, args.reduced_rows)


def _is_packed(args: Any) -> bool:
    """Whether the weight is in packed tiles."""
    return bool(args.tiled) and FORMATS.get(args.format) in GPU_FORMATS


def _x_accesses(args: Any, rank: int) -> list[Access]:
    layout, zeros = ActivationLayout.LANE_TILES if _is_packed(args) else args.tiled, []
    num_bytes = 2 * activation_cols(args.lead, True) if args.tiled else 0
    if num_bytes:
        require(args.lead % ACTIVATION_BLOCK_COLS == 0, "the columns of x do not begin with a block")
        require(not args.max_sampled_rows, "sampled rows have all columns")
        zeros.append(access(False, rank, args.x, num_bytes, content=ZEROS))
    num_rows = args.max_sampled_rows or MAX_BUCKET_ROWS
    return [*zeros, activation_access(False, rank, args.x + num_bytes, args.k, layout, num_rows)]


def _weight_access(args: Any, rank: int, num_rows: int) -> Access:
    if not _is_packed(args):
        return weight_access(rank, args.weight, args.k_pitch, num_rows, args.format)
    found = FORMATS[args.format]
    require(args.k_pitch % K_TILE == 0, "rows of the weight are not whole tiles")
    slabs = part_slabs(_partition(args), args.first_row, args.end_row)[1]
    num_bytes = sum(found.slab_bytes(end - begin, args.k_pitch, tiled=True) for begin, end in slabs)
    return access(False, rank, args.weight, num_bytes, align_bytes=found.copy_align_bytes, content=CONSTANT)
