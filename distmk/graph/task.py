"""The base class of task types, and the table of types.

A task type is one frozen dataclass. It has the operands as regions and slabs, the regions that a task reads and writes,
its encoding, and the bytes that an encoded task accesses. `check` relies on those bytes alone (`accesses`), not on the
regions. The bodies of the same name are in csrc or, for types of users' packages (`distmk.register`), beside the
dataclass. Python needs nothing more than the class in the table.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from distmk.abi import MAX_ROWS, TASK_ARGS_BYTES, Batch, LaunchKind, split_operand
from distmk.formats import FORMATS, Bf16
from distmk.graph.regions import Region, Slab, Weight


class Layout(Protocol):
    """The addresses of buffers and weights."""

    def operand(self, ref: Region | Slab | Weight | None) -> int:
        """The operand that stands for the first byte of a region, slab or weight; 0 for None."""
        ...


class Access(NamedTuple):
    """Bytes that an encoded task accesses: `num_rows` runs of `row_bytes` bytes, `stride` bytes apart, from byte
    `offset` of memory `space` of `rank`. Each run is aligned to `align_bytes`.

    early: a read that may come before the task's waits are met (polling).

    clears: a write of zeros (reset).

    content: how the task interprets the bytes, if they are more than plain numbers: indices, or a layout that both
    sides compute for themselves. All tasks must interpret them in the same way. CONSTANT: memory that no task writes,
    which may be prefetched in whole rows before the task's waits are met. ZEROS: memory of a buffer that no task writes.

    owner: this rank, if the task writes only the rows that its rank owns. The batch says which rows these are; in an
    iteration no two ranks own the same row. None: the task writes all of these bytes.
    """

    write: bool
    rank: int
    space: int
    offset: int
    row_bytes: int
    num_rows: int = 1
    stride: int = 0
    align_bytes: int = 4
    early: bool = False
    clears: bool = False
    content: Content = None
    owner: int | None = None


Content = tuple[str | int, ...] | None  # a name, and the numbers that the layout depends on
CONSTANT: Content = ("constant",)
ZEROS: Content = ("zeros",)
BATCH: Content = ("batch",)


def access(
    write: bool,
    rank: int,
    operand: int,
    row_bytes: int,
    num_rows: int = 1,
    stride: int | None = None,
    align_bytes: int = 4,
    content: Content = None,
) -> Access:
    """The access at an operand, which contains space and offset; `stride` None: rows without gaps."""
    space, offset = split_operand(operand)
    pitch = row_bytes if stride is None else stride
    return Access(write, rank, int(space), offset, row_bytes, num_rows, pitch, align_bytes, content=content)


def constant_access(rank: int, operand: int, row_bytes: int, num_rows: int) -> Access:
    """The read of whole rows of a weight."""
    return access(False, rank, operand, row_bytes, num_rows, None, math.gcd(row_bytes, 4), CONSTANT)


def weight_access(rank: int, operand: int, pitch: int, num_rows: int, format_id: int = Bf16.id) -> Access:
    """The read of rows of a matrix, each of `pitch` elements.

    ValueError: no format has the number `format_id`, or its rows cannot have so many columns.
    """
    require(format_id in FORMATS, "the weight has no known format")
    require(FORMATS[format_id].takes(pitch), "rows of the weight are not whole blocks of its format")
    return constant_access(rank, operand, FORMATS[format_id].slab_bytes(1, pitch, tiled=False), num_rows)


def require(is_met: bool, text: str) -> None:
    """Raises ValueError(text) for arguments of a task that contradict each other."""
    if not is_met:
        raise ValueError(text)


Columns = Callable[[bool, int, int, int, int, int], Access]  # bf16_access or f32_access


def bf16_access(write: bool, rank: int, operand: int, num_cols: int, num_rows: int, stride: int) -> Access:
    """`num_cols` columns of every row; `stride` in elements."""
    return access(write, rank, operand, 2 * num_cols, num_rows, 2 * stride, align_bytes=2)


def f32_access(write: bool, rank: int, operand: int, num_cols: int, num_rows: int, stride: int) -> Access:
    """`num_cols` columns of every row; `stride` in elements."""
    return access(write, rank, operand, 4 * num_cols, num_rows, 4 * stride)


def vector_accesses(
    rank: int, out: int, reset: int, num_cols: int, num_rows: int, stride: int, columns: Columns = bf16_access
) -> list[Access]:
    """The write of columns of every row and, unless `reset` is 0, the reset of the same columns in another buffer."""
    accesses = [columns(True, rank, out, num_cols, num_rows, stride)]
    if reset:
        accesses.append(columns(True, rank, reset, num_cols, num_rows, stride)._replace(clears=True))
    return accesses


Values = Mapping[Region | Slab, Any]  # torch tensors [rows, cols]


@dataclass(frozen=True)
class EarlyCompletion:
    """Condition under which a task is complete as soon as its body is done, before its waits are met.

    Argument `field` must not be 0, and the iteration must have more than `rows` rows. A producer of that many rows
    waits before it writes, so polled data proves as much as the waits would.
    """

    field: str
    rows: int


@dataclass(frozen=True)
class Bodies:
    """The C++ files of a type that `distmk.register` has added; None: no body for this platform."""

    host: Path | None
    device: Path | None


@dataclass(frozen=True, eq=False)
class Task:
    """Work on `rank`, for one worker unless `launch` is of another kind.

    op: the name of the operator that the task belongs to.
    worker: None lets the graph choose.
    deep_lookahead: the task may begin before the waits of its worker's last two tasks are met, not only of the last
      one.
    """

    rank: int
    op: str
    worker: int | None = None
    launch: LaunchKind = LaunchKind.AHEAD
    deep_lookahead: bool = False

    type_id: ClassVar[int]
    type_name: ClassVar[str]
    may_be_none: ClassVar[frozenset[str]]  # fields
    Args: ClassVar[type[ctypes.Structure]]
    bodies: ClassVar[Bodies | None] = None  # None: they are in csrc

    # Traits: properties of a type that the runtime must know. abi_header.py generates them as TaskTraits<TaskType> in
    # csrc/abi.h. If a trait names a hook, the body needs an overload of that function beside it.

    # The loader streams its weights, once for each time that the task is in a worker's list. Hooks: weight_slab,
    # throttles_signal.
    streams_weights: ClassVar[bool] = False
    # The body may be entered before the task's waits are met, and asks the context for its inputs itself.
    polls_inputs: ClassVar[bool] = False
    # The body may be entered as early, but does not poll. It first does the work that depends only on the iteration's
    # batch, on constants and on earlier iterations (Context::begin_prologue). It stores nothing to global memory
    # before it has its inputs.
    has_prologue: ClassVar[bool] = False
    completes_early: ClassVar[EarlyCompletion | None] = None
    # It resets Lamport rows in its argument `lamport_reset`, as many as the batch at `batch` says. Hook: reset_stale_rows.
    resets_rows: ClassVar[bool] = False
    # A massive launch has as many instances as the batch needs, up to max_instances(). Hook: num_work_items.
    counts_work_items: ClassVar[bool] = False
    loops_over_instances: ClassVar[bool] = False  # if spread, its body runs all instances of a worker's share
    # Variants of the body that GPUs inline into the consumers' loop. Hooks, if there are several: find_hot_variant,
    # run_hot_variant.
    hot_variants: ClassVar[int] = 0
    # In an iteration without work for it, a GPU signals its triggers before its waits are met, and its worker goes on.
    # So a wait for its events proves nothing about the tasks that it waits for. Argument: `batch`. Hook on GPUs:
    # is_idle.
    may_idle: ClassVar[bool] = False
    # Its body stores to other ranks' memory itself and never pushes. It signals when it is done on all ranks, so it may
    # be spread. Not among the generated traits.
    writes_peers: ClassVar[bool] = False
    # On GPUs its body uses the pipeline's memory, so no task of its program may stream anything into the pipeline. Not
    # generated.
    uses_pipeline: ClassVar[bool] = False
    # It has a body for GPUs and the emulator. For types in csrc only; types of users' packages have `bodies`. Not
    # generated.
    on_device: ClassVar[bool] = True
    # Only the kernel for packed weights has its body (DISTMK_PACKED), and no host twin. Not generated.
    takes_packed_weights: ClassVar[bool] = False
    # A scheduler runs it, never a worker.
    runs_on_scheduler: ClassVar[bool] = False

    def reads(self) -> Iterable[Region]:
        """The regions that the task reads; its weights are constant and need no mention."""
        return ()

    def writes(self) -> Iterable[Region]:
        """The regions that the task writes, on any rank."""
        return ()

    def owned_writes(self) -> Iterable[Region]:
        """Regions of `writes` that several ranks write, each rank its own rows."""
        return ()

    def dtypes(self) -> Mapping[str, str | None]:
        """The dtypes of the regions among the operands, by field; None: any dtype."""
        return {}

    def weight_bytes(self) -> int:
        """Bytes of weights streamed in an iteration; over the memory bandwidth, a lower bound of a decode step's time."""
        return 0

    def max_instances(self) -> int:
        """The most instances this task can have in a massive or spread launch."""
        return 1

    def derived(self, layout: Layout) -> dict[str, Any]:
        """The fields of `Args` that are not copied from the field of the same name of the task or of its `shape`."""
        return {}

    def encode(self, layout: Layout) -> ctypes.Structure:
        """The arguments of the body: regions and slabs become operands, None becomes 0."""
        args, derived, shape = self.Args(), self.derived(layout), getattr(self, "shape", None)
        for name, *_ in self.Args._fields_:
            if name in derived:
                value = derived[name]
            elif name == "pad":
                continue
            else:
                value = getattr(self if shape is None or hasattr(self, name) else shape, name)
            setattr(args, name, layout.operand(value) if value is None or isinstance(value, Region | Slab) else value)
        return args

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        """What the regions that the task writes contain afterwards, for `distmk.testing`: torch tensors [rows, cols].

        A tensor with fewer rows than the region stands for its first rows. `values`: what the slabs, and the regions
        that the task reads, contain before.
        """
        raise NotImplementedError

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        """Every access of a task on `rank` with arguments `args`. Raises ValueError for arguments that contradict each other."""
        raise NotImplementedError

    @classmethod
    def needs_packed_kernel(cls, args: Any) -> bool:
        """Whether GPUs need the kernel for packed weights for the task with arguments `args`."""
        return cls.takes_packed_weights

    @classmethod
    def num_instances(cls, args: Any) -> int:
        """The value of `max_instances` for the task with arguments `args`."""
        return 1

    @classmethod
    def check_capacity(cls, args: Any, step: Any) -> None:
        """Raise ValueError if the scheduler step with arguments `step` makes batches that are too large for the task."""

    @classmethod
    def skips_waits(cls, args: Any) -> bool:
        """Whether the task may be complete before its waits are met, in iterations of many rows (`completes_early`)."""
        return cls.completes_early is not None and bool(getattr(args, cls.completes_early.field))

    @classmethod
    def streams(cls, args: Any) -> bool:
        """Whether a GPU's loader fills the pipeline for the task."""
        return cls.streams_weights

    @classmethod
    def may_skip(cls, args: Any) -> bool:
        """Whether the task has nothing to do in some iterations, and its worker then goes on before its waits are met."""
        return cls.may_idle


TASK_TYPES: dict[int, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def task_type(type_id: int, name: str) -> Any:
    """Class decorator: add a task type under `type_id`, with bodies `body_<name>` in csrc. TypeError: see `add_type`."""

    def decorate(cls: T) -> T:
        add_type(cls, type_id, name)
        return cls

    return decorate


def add_type(cls: type[Task], type_id: int, name: str) -> None:
    """Add a task type to the table.

    TypeError: the id is taken, the arguments are too large, or its traits contradict each other or lack arguments.
    """
    if type_id in TASK_TYPES:
        raise TypeError(f"task type {name}: id {type_id} is taken by {TASK_TYPES[type_id].type_name}")
    if (num_bytes := ctypes.sizeof(cls.Args)) > TASK_ARGS_BYTES:
        raise TypeError(f"task type {name}: its arguments take {num_bytes} bytes; a descriptor has {TASK_ARGS_BYTES}")
    missing = _fields_of_traits(cls) - {entry[0] for entry in cls.Args._fields_}
    if missing:
        raise TypeError(f"task type {name}: its traits need arguments {', '.join(sorted(missing))}")
    if cls.hot_variants and not cls.polls_inputs:
        raise TypeError(f"task type {name}: a hot body is entered early, so it must poll its inputs (polls_inputs)")
    cls.type_id, cls.type_name = type_id, name
    cls.may_be_none = frozenset(field.name for field in fields(cls) if re.search("None|Optional", str(field.type)))
    TASK_TYPES[type_id] = cls


def _fields_of_traits(cls: type[Task]) -> set[str]:
    """Argument fields that csrc reads because the type has certain traits."""
    early = {cls.completes_early.field, "batch"} if cls.completes_early else set()
    idle = {"batch"} if cls.may_idle else set()
    return early | idle | ({"lamport_reset", "batch"} if cls.resets_rows else set())


def rows_of(batch_operand: int) -> int:
    """The rows that a task accesses: MAX_ROWS if it has a batch, else the only row of its buffers."""
    return MAX_ROWS if batch_operand else 1


def batch_access(rank: int, batch: int, write: bool = False) -> Access:
    """The whole batch metadata."""
    return access(write, rank, batch, ctypes.sizeof(Batch), content=BATCH)
