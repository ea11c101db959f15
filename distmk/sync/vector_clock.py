"""Vector clocks over two iterations of a program: for each task, everything that is known to have happened before it.

A node is a task in iteration 0 (its index) or in iteration 1 (its index + number of tasks). The tasks in one worker's
list are a chain: they run one after another. The clock of a node is an array by chain: the last position of that chain
that happened before the node, or at it. These are the vector clocks of Fidge (1988) and Mattern (1989), with chains in
place of processes.

A task that writes to several ranks takes two positions. It signals a peer's events together with the data for that
peer. It has then read all that it reads, but its writes to other ranks may still be under way. The clock of a waiter
for such a signal includes the first position, `early`. Once a node knows that the task is done, its clock includes the
second one, `position`.

A task that may idle signals in some iterations before its waits are met. A waiter for such a task knows that the task
is done, and what happened before it on its chain and at the iteration barrier, but nothing about the tasks that it
waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from distmk.errors import UsageError

VectorClock = npt.NDArray[np.uint16]
"""uint16 [chains]."""


class VectorClocks:
    """The clocks of all nodes.

    chain: int64 [nodes], the chain of a node.
    position, early: uint16 [nodes], the positions of a node on its chain; they are equal for a task that writes to at
      most one rank.
    table: uint16 [nodes, chains], the clocks; zero at first, complete after `settle`.
    idle: by node, the clock that a signal of a task that may idle proves.
    """

    def __init__(
        self,
        placements: Sequence[tuple[int, int | None]],
        num_workers: int,
        num_ranks: int,
        multi_rank: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """`placements`: (rank, worker) of each task in program order, or (rank, None) for a task in no single worker's
        list. `multi_rank`: bool [tasks], which tasks write to several ranks; None: no task does.

        A dispatched or spread task is its own chain in each iteration, because only events order it after itself. (A
        worker that has run its share of a spread task could also know this share to be done; the clocks do not use
        that.)

        Raises UsageError if a worker's list is too long for 16-bit positions.
        """
        self.num_tasks = len(placements)
        steps = np.ones(self.num_tasks, np.int64) if multi_rank is None else 1 + multi_rank.astype(np.int64)
        num_unlisted = sum(worker is None for _, worker in placements)
        self.num_chains = num_ranks * num_workers + 2 * num_unlisted
        self.chain = np.zeros(2 * self.num_tasks, np.int64)
        position = np.concatenate([steps, steps])
        length = np.zeros(num_ranks * num_workers, np.int64)
        next_chain = num_ranks * num_workers
        for task, (rank, worker) in enumerate(placements):
            if worker is None:
                self.chain[task], self.chain[task + self.num_tasks] = next_chain, next_chain + num_unlisted
                next_chain += 1
            else:
                chain = rank * num_workers + worker
                length[chain] += steps[task]
                self.chain[task] = self.chain[task + self.num_tasks] = chain
                position[task] = length[chain]
        listed = self.chain[: self.num_tasks] < num_ranks * num_workers
        second = position[self.num_tasks :]
        second[listed] = position[: self.num_tasks][listed] + length[self.chain[: self.num_tasks][listed]]
        if position.max(initial=0) > np.iinfo(np.uint16).max:
            raise UsageError("a worker's queue is too long (over 16383 tasks); use more workers")
        self.position = position.astype(np.uint16)
        self.early = (position - np.concatenate([steps, steps]) + 1).astype(np.uint16)
        self.table = np.zeros((2 * self.num_tasks, self.num_chains), np.uint16)
        self.idle: dict[int, VectorClock] = {}

    def before_all(self, nodes: Iterable[int], early: Iterable[int] = ()) -> VectorClock:
        """The least clock that includes every one of `nodes`, and the first position of every one of `early`."""
        need = np.zeros(self.num_chains, np.uint16)
        for group, position in ((nodes, self.position), (early, self.early)):
            index = np.fromiter(group, np.int64)
            np.maximum.at(need, self.chain[index], position[index])
        return need

    def join(self, nodes: Sequence[int], early: Sequence[int] = ()) -> VectorClock:
        """The clock of a waiter for the end of all `nodes` and for a signal with the data of all `early` nodes."""
        index = np.asarray([*nodes, *early], np.int64)
        rows = self.table[index]
        if self.idle:
            for at, node in enumerate(index.tolist()):
                if node in self.idle:
                    rows[at] = self.idle[node]
        pushed = index[len(nodes) :]
        rows[np.arange(len(nodes), len(index)), self.chain[pushed]] = self.early[pushed]
        return np.asarray(rows.max(axis=0), np.uint16)

    def when_signaled(self, node: int) -> VectorClock:
        """The clock of everything that has happened when `node` signals."""
        known = self.idle.get(node)
        clock: VectorClock = self.table[node] if known is None else known
        return clock

    def settle_idle(self, node: int, clock: VectorClock) -> None:
        """Store the clock that signals of `node`, which may idle, prove. `clock`: the node's clock without its waits."""
        settled = self.idle[node] = clock.copy()
        settled[self.chain[node]] = max(settled[self.chain[node]], self.position[node])

    def happened(self, node: int, clock: VectorClock) -> bool:
        """Whether `clock` knows that `node` is done."""
        return bool(clock[self.chain[node]] >= self.position[node])

    def settle(self, node: int) -> None:
        """Complete the clock of `node`, which includes what the node waited for, with the node itself."""
        clock = self.table[node]
        clock[self.chain[node]] = max(clock[self.chain[node]], self.position[node])
