"""A task graph: buffers, weights and tasks of all ranks, in the order a single thread would run them.

That order is the meaning of the program: two tasks that touch the same bytes, one of them writing, run in it. Nothing else
is said by hand; `events` derives the waits and triggers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from distmk.abi import MAX_RANKS, LaunchKind, Space
from distmk.errors import UsageError
from distmk.graph.regions import ITEM_BYTES, Buffer, Region, Segment, Slab, Tiling, Weight, WeightKind
from distmk.graph.task import Task

T = TypeVar("T", bound=Task)


@dataclass
class Graph:
    """Builder of a task graph over `num_ranks` ranks of `num_workers` workers each.

    `num_schedulers` (at most one a worker, the default) share out just-in-time tasks on every rank.
    """

    num_ranks: int
    num_workers: int = 1
    num_schedulers: int | None = None
    tasks: list[Task] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    batch: Buffer | None = None  # the row table; its arrival starts an iteration
    _next_worker: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS or self.num_workers < 1:
            raise UsageError(
                f"a graph has 1 to {MAX_RANKS} ranks and at least one worker, not {self.num_ranks} and {self.num_workers}"
            )
        self.num_schedulers = self.num_schedulers or self.num_workers
        if self.num_schedulers > self.num_workers:
            raise UsageError(f"{self.num_schedulers} schedulers are more than {self.num_workers} workers")

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
        """A buffer of `rows` x `cols` elements of f32, bf16, i32 or u8, on every rank; `lamport`: see `Buffer`."""
        if dtype not in ITEM_BYTES or cols < 1 or rows < 1:
            raise UsageError(
                f"buffer {name}: {rows} x {cols} of {dtype}; expected positive sizes of {list(ITEM_BYTES)}"
            )
        if any(buffer.name == name for buffer in self.buffers):
            raise UsageError(f"buffer {name} is there already; give it another name")
        if lamport and space is not Space.HEAP:
            raise UsageError(f"buffer {name} is local; what arrives from peers arrives on the symmetric heap")
        made = Buffer(len(self.buffers), name, rows, cols, dtype, space, lamport)
        self.buffers.append(made)
        return made

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
    ) -> Weight:
        """Read-only memory of one rank, packed from checkpoint tensors."""
        rows = rows or sum(s.rows for s in segments)
        made = Weight(name, rank, rows, cols, kind, tuple(segments), col_begin, tiling=tiling, col_scale=col_scale)
        self.weights.append(made)
        return made

    def constant(self, name: str, rank: int, array: npt.NDArray[Any]) -> Slab:
        """Read-only memory given as an array: float32 vectors, or uint16 holding bf16 matrices [rows, cols]."""
        data = np.ascontiguousarray(array)
        rows, cols = (1, data.shape[0]) if data.ndim == 1 else data.shape
        made = Weight(name, rank, rows, cols, WeightKind.DATA, data=data)
        self.weights.append(made)
        return Slab(made, 0, rows)

    def add(self, task: T) -> T:
        """Append a task; without a `worker` it goes to the rank's workers in turn."""
        if not 0 <= task.rank < self.num_ranks:
            raise UsageError(f"task {task.op} is on rank {task.rank} of {self.num_ranks}")
        if task.launch is LaunchKind.AHEAD and task.worker is None:
            turn = self._next_worker.get(task.rank, 0)
            self._next_worker[task.rank] = turn + 1
            object.__setattr__(task, "worker", turn % self.num_workers)
        elif task.worker is not None and not 0 <= task.worker < self.num_workers:
            raise UsageError(f"task {task.op} is for worker {task.worker} of {self.num_workers}")
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
        """Every worker fires its triggers once, whatever its share: no push may fire them, and no stream count it."""
        if task.worker is not None:
            raise UsageError(f"task {task.op} is spread over all workers; give it no worker")
        if task.streams_weights:
            raise UsageError(f"task {task.op} streams weights, so it cannot be spread; add one task a worker instead")
        if task.max_instances() > self.num_workers and not task.goes_through_shares:
            raise UsageError(
                f"task {task.op} has up to {task.max_instances()} instances for {self.num_workers} workers, "
                f"and its body runs one; launch it {LaunchKind.MASSIVE.name} instead"
            )
        if away := [region for region in task.writes() if region.rank != task.rank]:
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
                if dtype and region.buffer.dtype != dtype:
                    raise UsageError(f"task {task.op}: {name} must be {dtype}; {region} is {region.buffer.dtype}")

    def _check_reach(self, task: Task) -> None:
        for region in task.reads():
            if region.rank != task.rank:
                raise UsageError(f"task {task.op} on rank {task.rank} reads {region}: a task reads its own rank only")
        for region in task.writes():
            self._check_write(task, region)

    def _check_write(self, task: Task, region: Region) -> None:
        if not 0 <= region.rank < self.num_ranks:
            raise UsageError(f"task {task.op} writes {region}, but there are {self.num_ranks} ranks")
        if region.rank != task.rank and region.buffer.space is not Space.HEAP:
            raise UsageError(f"task {task.op} on rank {task.rank} writes {region}: peers reach the symmetric heap only")
