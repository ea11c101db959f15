"""Vector clocks over two iterations of a program: what is known to have happened before what.

A node is a task in iteration 0 (its index) or 1 (index + number of tasks). A worker's ahead-of-time tasks are a chain;
`clock[n][c]` is the last position of chain c that happened before or at node n.
(Fidge and Mattern's vector clocks, with chains in place of processes.)

A task that writes to several ranks takes two positions. A push fires the events of its rank with its data, when the
task has read all it reads but may not have reached the other ranks yet: who heard of the task that way knows of the
first position, `early`. Whoever heard of its end knows of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from distmk.errors import UsageError

Clock = npt.NDArray[np.uint16]


class Clocks:
    """Clocks of the nodes of tasks placed at (rank, worker), or (rank, None) where no one worker's queue has the task.

    A task that is handed out or spread is a chain of its own in each iteration: nothing but events orders it after
    itself. (What a worker runs behind its share of a spread task knows of that share; no use is made of it.)
    """

    def __init__(
        self,
        placements: Sequence[tuple[int, int | None]],
        num_workers: int,
        num_ranks: int,
        spread: npt.NDArray[np.bool_] | None = None,  # which tasks write to several ranks
    ) -> None:
        self.num_tasks = len(placements)
        steps = np.ones(self.num_tasks, np.int64) if spread is None else 1 + spread.astype(np.int64)
        num_loose = sum(worker is None for _, worker in placements)
        self.num_chains = num_ranks * num_workers + 2 * num_loose
        self.chain = np.zeros(2 * self.num_tasks, np.int64)
        position = np.concatenate([steps, steps])
        length = np.zeros(num_ranks * num_workers, np.int64)
        extra = num_ranks * num_workers
        for task, (rank, worker) in enumerate(placements):
            if worker is None:
                self.chain[task], self.chain[task + self.num_tasks] = extra, extra + num_loose
                extra += 1
            else:
                chain = rank * num_workers + worker
                length[chain] += steps[task]
                self.chain[task] = self.chain[task + self.num_tasks] = chain
                position[task] = length[chain]
        fixed = self.chain[: self.num_tasks] < num_ranks * num_workers
        later = position[self.num_tasks :]
        later[fixed] = position[: self.num_tasks][fixed] + length[self.chain[: self.num_tasks][fixed]]
        if position.max(initial=0) > np.iinfo(np.uint16).max:
            raise UsageError("a worker's queue is too long (over 16383 tasks); use more workers")
        self.position = position.astype(np.uint16)
        self.early = (position - np.concatenate([steps, steps]) + 1).astype(np.uint16)
        self.table = np.zeros((2 * self.num_tasks, self.num_chains), np.uint16)

    def before_all(self, nodes: Iterable[int], early: Iterable[int] = ()) -> Clock:
        """The least clock that has all of `nodes`, and `early` as far as a push tells, behind it."""
        need = np.zeros(self.num_chains, np.uint16)
        for group, position in ((nodes, self.position), (early, self.early)):
            index = np.fromiter(group, np.int64)
            np.maximum.at(need, self.chain[index], position[index])
        return need

    def join(self, nodes: Sequence[int], early: Sequence[int] = ()) -> Clock:
        """What is known once all of `nodes` are done and the pushes of `early` have come."""
        index = np.asarray([*nodes, *early], np.int64)
        rows = self.table[index]
        pushed = index[len(nodes) :]
        rows[np.arange(len(nodes), len(index)), self.chain[pushed]] = self.early[pushed]
        return np.asarray(rows.max(axis=0), np.uint16)

    def happened(self, node: int, clock: Clock) -> bool:
        """Whether `node` is behind `clock`."""
        return bool(clock[self.chain[node]] >= self.position[node])

    def started(self, node: int, clock: Clock) -> bool:
        """Whether `node` had begun, and read what it reads, before `clock`."""
        return bool(clock[self.chain[node]] >= self.early[node])

    def settle(self, node: int, clock: Clock) -> None:
        """Give `node` its clock: what it had waited for, and itself."""
        clock[self.chain[node]] = max(clock[self.chain[node]], self.position[node])
        self.table[node] = clock
