"""The all-reduces of a graph, task by task in numpy: what is left on the residual stream of every rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from distmk.abi import MAX_ROWS, Epilogue
from distmk.graph.regions import Buffer, Region
from distmk.graph.task import Task
from distmk.tasks import Embed, Linear, Put, Sum

Floats = npt.NDArray[np.float32]


class AllReduce:
    """Runs the tasks of one all-reduce in program order, on random partial sums in place of products."""

    def __init__(self, tasks: Iterable[Task], rng: np.random.Generator) -> None:
        self.rng = rng
        self.memory: dict[tuple[Buffer, int], Floats] = {}
        self.partials: dict[tuple[int, int], Floats] = {}  # by rank and worker: [MAX_ROWS, columns]
        self.sums: dict[tuple[int, int], Floats] = {}  # likewise: what the last Sum of a worker has left
        for task in tasks:
            self._run(task)

    def _run(self, task: Task) -> None:
        assert task.worker is not None
        if isinstance(task, Linear | Embed):
            # Of very different size, so that the order in which they are added up shows.
            block = self._block(task.out)
            block[:] = self.rng.standard_normal(block.shape) * 10.0 ** self.rng.integers(-3, 4, block.shape)
            self.partials[task.rank, task.worker] = block.copy()
            for target in range(task.num_ranks) if task.epilogue is Epilogue.PUSH else ():
                self._block(task.out.on(target))[:] = block
        elif isinstance(task, Put):
            assert task.batch
            self._block(task.dst)[:] = self._block(task.src)
        elif isinstance(task, Sum):
            total = self._block(task.dst) if task.accumulates else np.zeros_like(self._block(task.dst))
            for block in task.blocks:
                total = total + self._block(block)
            self._block(task.dst)[:] = self.sums[task.rank, task.worker] = total

    def _block(self, region: Region) -> Floats:
        """A view of a region as [MAX_ROWS, columns]; NaN before it is written, the residual stream 0."""
        buffer = region.buffer
        if (buffer, region.rank) not in self.memory:
            empty = 0.0 if buffer.name == "x" else np.nan
            self.memory[buffer, region.rank] = np.full((buffer.rows, buffer.cols), empty, np.float32)
        columns = self.memory[buffer, region.rank][:, region.begin : region.end]
        return columns if buffer.rows > 1 else columns.reshape(MAX_ROWS, -1)

    def check(self, hosts: tuple[range, ...]) -> None:
        """AssertionError unless all ranks hold the partial sums added up in rank order within a host, then in host order."""
        for rank, worker in self.sums:
            by_host = []
            for ranks in hosts:
                by_host.append(self.partials[ranks[0], worker])
                for other in ranks[1:]:
                    by_host[-1] = by_host[-1] + self.partials[other, worker]
            want = by_host[0]
            for partial in by_host[1:]:
                want = want + partial
            np.testing.assert_array_equal(self.sums[rank, worker], want, f"rank {rank}, block of worker {worker}")
