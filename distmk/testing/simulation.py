"""The meaning of a graph according to its tasks' oracles: all ranks' memory after one thread has run the tasks in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region, Slab
from distmk.graph.task import Task
from distmk.testing.arrays import Array, Bytes, to_bytes
from distmk.testing.build import Inputs
from distmk.testing.launches import Rows, byte_cols

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}


class Simulation:
    """Runs a graph on the oracles of its tasks.

    memory: the contents of each rank's buffers.
    given: the initial contents of regions, as byte columns and rows. Regions that tasks read are random, unless
      `inputs` has them, and zero in Lamport buffers.
    written: the rows and byte columns that tasks have written.

    UsageError: a task has no oracle, or its oracle does not fit the regions that it reads and writes.
    """

    def __init__(self, graph: Graph, rng: np.random.Generator, inputs: Inputs) -> None:
        self.graph = graph
        self.memory: dict[tuple[int, Buffer], Bytes] = {}
        self.given: dict[tuple[int, Buffer], list[tuple[slice, Any]]] = {}
        self.written: dict[tuple[int, Buffer], list[Rows]] = {}
        for rank in range(graph.num_ranks):
            for buffer in graph.buffers:
                self.memory[rank, buffer] = np.zeros((buffer.rows, buffer.row_bytes), np.uint8)
        for region in dict.fromkeys(region for task in graph.tasks for region in task.reads()):
            if not region.buffer.lamport:
                self._give(region, _random(rng, region))
        for region, values in inputs.items():
            self._give(region, torch.as_tensor(values))

    def run(self, num_iterations: int) -> None:
        """Run all tasks in order, `num_iterations` times."""
        for _ in range(num_iterations):
            for task in self.graph.tasks:
                self._run(task)

    def content(self, region: Region, num_rows: int | None = None) -> torch.Tensor:
        """The first rows of a region, as a tensor of its dtype."""
        rows = self.memory[region.rank, region.buffer][:num_rows, byte_cols(region)]
        return as_tensor(rows, region.buffer.dtype)

    def _run(self, task: Task) -> None:
        name = type(task).__name__
        values = _Values(task)
        for region in task.reads():
            values[region] = self.content(region)
        for field in vars(task).values():
            for slab in field if isinstance(field, tuple) and not isinstance(field, Slab) else (field,):
                if isinstance(slab, Slab):
                    values[slab] = _slab(task, slab)
        try:
            results = task.oracle(values)
        except NotImplementedError:
            raise UsageError(f"{name} has no oracle(), with which distmk.testing compares its bodies") from None
        if set(results) != (expected := set(task.writes())):
            shown = [", ".join(sorted(map(str, regions))) or "nothing" for regions in (results, expected)]
            raise UsageError(f"the oracle of {name} returns {shown[0]}; task {task.op} writes {shown[1]}")
        for region, result in results.items():
            self._write(region, torch.as_tensor(result))

    def _give(self, region: Region, values: torch.Tensor) -> None:
        raw = self._store(region, values)
        self.given.setdefault((region.rank, region.buffer), []).append((byte_cols(region), raw))

    def _write(self, region: Region, values: torch.Tensor) -> None:
        raw = self._store(region, values)
        self.written.setdefault((region.rank, region.buffer), []).append((slice(0, len(raw)), byte_cols(region)))

    def _store(self, region: Region, values: torch.Tensor) -> Bytes:
        """Store rows of a region; returns their bytes, [rows, bytes]."""
        if values.numel() % region.cols or values.numel() > region.cols * region.buffer.rows:
            raise UsageError(f"{region} has {region.buffer.rows} x {region.cols} elements, not {list(values.shape)}")
        cols = byte_cols(region)
        raw = to_bytes(values.to(DTYPES[region.buffer.dtype])).reshape(-1, cols.stop - cols.start)
        self.memory[region.rank, region.buffer][: len(raw), cols] = raw
        return raw


class _Values(dict[Region | Slab, torch.Tensor]):
    """The values that the oracle of a task may read."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task

    def __missing__(self, key: Any) -> torch.Tensor:
        name = type(self._task).__name__
        raise UsageError(f"the oracle of {name} asks for {key}, which is not among what the task reads")


def as_tensor(raw: Array, dtype: str) -> torch.Tensor:
    """Rows of bytes as a tensor [rows, columns] of a buffer's dtype; a copy."""
    return torch.from_numpy(np.array(raw, order="C")).view(DTYPES[dtype])


def _random(rng: np.random.Generator, region: Region) -> torch.Tensor:
    shape = (region.buffer.rows, region.cols)
    if region.buffer.dtype in ("f32", "bf16"):
        return torch.from_numpy(rng.standard_normal(shape))
    low, high = (-100, 100) if region.buffer.dtype == "i32" else (0, 256)
    return torch.from_numpy(rng.integers(low, high, shape))


def _slab(task: Task, slab: Slab) -> torch.Tensor:
    """Rows of a constant. UsageError: it is a weight of a checkpoint, which is not available here."""
    data: npt.NDArray[Any] | None = slab.weight.data
    if data is None:
        raise UsageError(f"task {task.op} has weight {slab.weight.name} of a checkpoint; test it with Graph.constant")
    rows = data.reshape(slab.weight.rows, -1)[slab.row_begin : slab.row_end]
    return as_tensor(rows.view(np.uint8), "bf16") if data.dtype == np.uint16 else torch.from_numpy(rows.copy())
