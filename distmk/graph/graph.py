"""A task graph: buffers, weights and tasks of all ranks.

The tasks are in the order in which a single thread would run them.

Program order defines the meaning of the graph: if two tasks access the same bytes and at least one of them writes, the
first one runs before the second. No dependency is declared by hand; `sync.events` derives waits and triggers from the
regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from distmk.abi import MAX_RANKS, LaunchKind, Space
from distmk.errors import UsageError, one_line, shown
from distmk.formats import Bf16, WeightFormat
from distmk.graph.hosts import host_ranks
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Segment, Slab, Tiling, Weight, WeightKind
from distmk.graph.task import Task
from distmk.parameter_checks import whole

T = TypeVar("T", bound=Task)

_MOST = (1 << 31) - 1  # limit for ranks, workers and rows, and for columns of several rows, whose stride has 32 bits
_MOST_ELEMENTS = 1 << 44  # limit for elements of a single row, such as a KV cache: more than any memory has


@dataclass
class Memory:
    """The buffers and weights of all programs of a launch, by name.

    Graphs with one `Memory` share buffers and weights of the same name.
    """

    buffers: dict[str, Buffer] = field(default_factory=dict)
    weights: dict[tuple[str, int], Weight] = field(default_factory=dict)


@dataclass
class Graph:
    """Builder of a task graph over `num_ranks` ranks of `num_workers` workers each.

    num_schedulers: schedulers of a rank, which dispatch just-in-time tasks; at most one per worker, which is the
      default.
    batch: the buffer of the batch metadata; an iteration starts on a rank when its batch has been written there.
    host_sizes: for each host, the number of consecutive ranks on it, which share memory; (): all ranks share memory.
    memory: shared with the other programs of the launch; a buffer or weight of the same name is the same memory.

    The constructor raises UsageError for numbers out of range; methods raise it for anything that cannot be part of a
    graph.
    """

    num_ranks: int
    num_workers: int = 1
    num_schedulers: int | None = None
    tasks: list[Task] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    batch: Buffer | None = None
    host_sizes: tuple[int, ...] = ()
    memory: Memory = field(default_factory=Memory)
    _num_round_robin: dict[int, int] = field(default_factory=dict)  # by rank: tasks that have a worker so far
    _names: set[str] = field(default_factory=set, repr=False)  # of buffers

    def __post_init__(self) -> None:
        self.num_ranks = whole("num_ranks", self.num_ranks, 1, MAX_RANKS, f"1 to {MAX_RANKS}")
        self.num_workers = whole("num_workers", self.num_workers, 1, _MOST, "1 or more")
        most = self.num_workers
        if self.num_schedulers is None:
            self.num_schedulers = most
        self.num_schedulers = whole(
            "num_schedulers", self.num_schedulers, 1, most, f"1 to {most}, one a worker at most"
        )
        host_ranks(self.host_sizes, self.num_ranks)  # raises if the sizes do not fit the number of ranks

    @property
    def hosts(self) -> tuple[range, ...]:
        """The ranks of each host."""
        return host_ranks(self.host_sizes, self.num_ranks)

    def buffer(
        self,
        name: str,
        cols: int,
        *,
        rows: int = 1,
        dtype: str = "f32",
        space: Space = Space.HEAP,
        lamport: bool = False,
    ) -> Buffer:
        """Add a buffer [rows, cols] of f32, bf16, i32 or u8 on every rank; `lamport`: see `Buffer`.

        UsageError: this graph already has a buffer of that name, or another program has a different buffer of that
        name.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"the name of a buffer is {shown(name)}; expected text")
        rows = whole(f"rows of buffer {name}", rows, 1, _MOST, f"a whole number from 1 to {_MOST}")
        most = _MOST if rows > 1 else _MOST_ELEMENTS
        cols = whole(f"cols of buffer {name}", cols, 1, most, f"a whole number from 1 to {most}")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise UsageError(f"dtype of buffer {name} is {shown(dtype)}; expected one of {', '.join(ITEM_BYTES)}")
        if name in self._names:
            raise UsageError(f"buffer {name} is there already; give it another name")
        if lamport and space is not Space.HEAP:
            raise UsageError(f"buffer {name} is local; a Lamport buffer must be on the symmetric heap")
        if lamport and name in self.memory.buffers:
            raise UsageError(
                f"buffer {name} is a Lamport buffer, and another program has one of that name; give it another"
            )
        made = Buffer(name, rows, cols, dtype, space, lamport)
        known = self.memory.buffers.setdefault(name, made)
        if not _are_alike(known, made):
            raise UsageError(f"buffer {name} is there already, and different, in another program; give it another name")
        self._names.add(name)
        self.buffers.append(known)
        return known

    def weight(
        self,
        name: str,
        rank: int,
        cols: int,
        segments: list[Segment],
        kind: WeightKind,
        col_begin: int = 0,
        rows: int = 0,
        tiling: Tiling | None = None,
        col_scale: str | None = None,
        offset: float = 0.0,
        scale: float = 1.0,
        format: type[WeightFormat] = Bf16,
        lead: int = 0,
        tail: int = 0,
    ) -> Weight:
        """Add read-only memory of one rank, packed from checkpoint tensors; see `Weight`.

        `rows` 0: as many as in `segments`.

        UsageError: the rank has a different weight of that name.
        """
        rows = rows or sum(s.rows for s in segments)
        made = Weight(
            name,
            rank,
            rows,
            cols,
            kind,
            tuple(segments),
            col_begin,
            tiling=tiling,
            col_scale=col_scale,
            offset=offset,
            scale=scale,
            format=format,
            lead=lead,
            tail=tail,
        )
        known = self.memory.weights.setdefault((name, rank), made)
        if not _are_alike(known, made):
            raise UsageError(f"two weights of rank {rank} are called {name}; give one of them another name")
        if known not in self.weights:
            self.weights.append(known)
        return known

    def constant(self, name: str, rank: int, array: npt.NDArray[Any], tiling: Tiling | None = None) -> Slab:
        """Add read-only memory of one rank, given as an array: a float32 vector, or a bf16 matrix [rows, cols] as uint16.

        tiling: how to pack a matrix when it is uploaded; see `Weight`. On GPUs, `Linear` needs tiles; `Target.matrix`
        adds them.

        UsageError: the array is neither of the two, or the graph has no such rank.
        """
        try:
            data = np.ascontiguousarray(array)
        except (TypeError, ValueError) as error:
            raise UsageError(f"constant {name} is no array: {one_line(error)}; give bf16 as uint16 bits") from None
        if data.ndim not in (1, 2) or not data.size or data.dtype.kind not in "fiu" or not 0 <= rank < self.num_ranks:
            raise UsageError(
                f"constant {name} is {data.dtype} {list(data.shape)} on rank {rank} of {self.num_ranks}; expected numbers [n] or "
                "[rows, cols], on one of the ranks"
            )
        rows, cols = (1, data.shape[0]) if data.ndim == 1 else data.shape
        made = Weight(name, rank, rows, cols, WeightKind.DATA, data=data, tiling=tiling)
        self.weights.append(made)
        return Slab(made, 0, rows)

    def add(self, task: T) -> T:
        """Append a task. Without a `worker`, ahead-of-time tasks of a rank go to its workers round-robin."""
        if not isinstance(task, Task):
            raise UsageError(f"{shown(task)} is no task; give one, such as Affine(rank, op, src=..., dst=...)")
        if not isinstance(task.launch, LaunchKind):
            raise UsageError(f"task {task.op} has the launch {shown(task.launch)}; give one of LaunchKind")
        if not isinstance(task.rank, int) or not 0 <= task.rank < self.num_ranks:
            raise UsageError(f"task {task.op} is on rank {shown(task.rank)} of {self.num_ranks}")
        if task.launch is LaunchKind.AHEAD and task.worker is None:
            num_before = self._num_round_robin.get(task.rank, 0)
            self._num_round_robin[task.rank] = num_before + 1
            object.__setattr__(task, "worker", num_before % self.num_workers)
        elif task.worker is not None and not (isinstance(task.worker, int) and 0 <= task.worker < self.num_workers):
            raise UsageError(f"task {task.op} is for worker {shown(task.worker)} of {self.num_workers}")
        if task.launch is LaunchKind.SPREAD:
            self._check_spread(task)
        elif task.streams_weights and task.launch is not LaunchKind.AHEAD:
            raise UsageError(
                f"task {task.op} streams weights, which its worker fetches ahead of time; launch it {LaunchKind.AHEAD.name}"
            )
        self._check_operands(task)
        self._check_reach(task)
        self.tasks.append(task)
        return task

    def _check_spread(self, task: Task) -> None:
        """Refuse a spread task that needs a push, streams weights, or has more instances than its workers can run.

        Every worker signals a spread task's triggers once, whatever its share, so no push may signal them. The task may
        write to peers only if its body does so without pushes. The loader streams weights once for each task in a list,
        so a spread task must have none.
        """
        if task.worker is not None:
            raise UsageError(f"task {task.op} is spread over all workers; give it no worker")
        if task.streams_weights:
            raise UsageError(f"task {task.op} streams weights, so it cannot be spread; add one task a worker instead")
        if task.max_instances() > self.num_workers and not task.loops_over_instances:
            raise UsageError(
                f"task {task.op} has up to {task.max_instances()} instances for {self.num_workers} workers, "
                f"and its body runs one; launch it {LaunchKind.MASSIVE.name} instead"
            )
        if not task.writes_peers and (away := [region for region in task.writes() if region.rank != task.rank]):
            raise UsageError(
                f"task {task.op} on rank {task.rank} writes {away[0]}: a spread task writes its own rank only"
            )

    def _check_operands(self, task: Task) -> None:
        for name, dtype in task.dtypes().items():
            value = getattr(task, name)
            regions = value if isinstance(value, tuple) and not isinstance(value, Region) else (value,)
            if name not in task.may_be_none and (not regions or None in regions):
                raise UsageError(f"task {task.op} has no {name}; give it a region" + (f" of {dtype}" if dtype else ""))
            for region in filter(None, regions):
                _check_region(task, name, region)
                if dtype and region.buffer.dtype != dtype:
                    raise UsageError(f"task {task.op}: {name} must be {dtype}; {region} is {region.buffer.dtype}")

    def _check_reach(self, task: Task) -> None:
        for region in _regions(task, "reads"):
            if region.rank != task.rank:
                raise UsageError(f"task {task.op} on rank {task.rank} reads {region}: a task reads its own rank only")
        for region in _regions(task, "writes"):
            self._check_write(task, region)

    def _check_write(self, task: Task, region: Region) -> None:
        if not 0 <= region.rank < self.num_ranks:
            raise UsageError(f"task {task.op} writes {region}, but there are {self.num_ranks} ranks")
        if region.rank != task.rank and region.buffer.space is not Space.HEAP:
            raise UsageError(f"task {task.op} on rank {task.rank} writes {region}: peers reach the symmetric heap only")


def _are_alike(known: Buffer | Weight, made: Buffer | Weight) -> bool:
    return all(getattr(known, each.name) == getattr(made, each.name) for each in fields(made))


def _regions(task: Task, method: str) -> Iterator[Region]:
    """The regions that `reads` or `writes` of a task returns. UsageError: it returns something else."""
    regions = getattr(task, method)()
    if not isinstance(regions, Iterable):
        raise UsageError(
            f"task {task.op}: {method}() returns {shown(regions)}; return a tuple of regions, which may be empty"
        )
    for region in regions:
        _check_region(task, f"{method}()", region)
        yield region


def _check_region(task: Task, name: str, region: object) -> None:
    if not isinstance(region, Region):
        raise UsageError(f"task {task.op}: {name} is {shown(region)}; give a region, such as buffer.at(rank)")
