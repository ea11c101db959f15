"""The all-reduce across hosts: one message for each pair of hosts, and the same order of additions on every rank.

Each host has a leader. Its ranks take turns: each all-reduce has another leader than the one before.

1. Every rank puts its partial sums to the leader of its host (`gather`).
2. The leader adds them up in rank order (`reduce_host`). If a host has one rank, that rank's partial sums are the
   host's.
3. The leader puts the host's sum to the leader of every other host (`exchange`).
4. Each leader adds up the hosts' sums in the order of the hosts (`reduce_hosts`): the total, with the same bits on all
   hosts.
5. It puts the total to the other ranks of its host (`broadcast`), and Sum tasks on each rank add it to the residual
   stream.

Puts carry the rows of the batch. They are in the lists of several workers, so that none waits for another to arrive.
Sums are divided over the workers like the columns of the residual stream. Events order all steps, since polling would
save little compared with the time of a message. Two successive all-reduces use different memory. The exchange of the
second one then proves that the first one's memory has been read, and no additional message is needed.

Source: hierarchical all-reduce (Jia et al., "Highly scalable deep learning training system", arXiv:1807.11205).
"""

from __future__ import annotations

from distmk.graph.graph import Graph
from distmk.graph.partition import Partition
from distmk.graph.regions import Buffer
from distmk.lower.plan import WorkPlan
from distmk.lower.slab_buffers import SlabBuffers
from distmk.tasks import Put, Sum


def partial_sums(plan: WorkPlan, buffers: SlabBuffers, write: int, rank: int) -> Buffer:
    """The buffer for the partial sums of `rank` in write `write` of the residual stream.

    If the rank is alone on its host, this is the buffer for the host's sum.
    """
    sums = buffers.host_sums_at(write)
    host, ranks = next((host, ranks) for host, ranks in enumerate(plan.options.hosts) if rank in ranks)
    return sums.ranks[rank - ranks.start] if len(ranks) > 1 else sums.hosts[host]


def emit_total(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, name: str, write: int, partition: Partition) -> None:
    """The tasks after `name` that compute the total of all partial sums on every rank."""
    _Emitter(graph, plan, buffers, name, write, partition).emit()


class _Emitter:
    """Emits all tasks of a step before those of the next step, because a worker runs its tasks in the order of emission."""

    def __init__(
        self, graph: Graph, plan: WorkPlan, buffers: SlabBuffers, name: str, write: int, partition: Partition
    ) -> None:
        self.graph, self.buffers, self.name, self.partition = graph, buffers, name, partition
        self.sums, self.hosts = buffers.host_sums_at(write), plan.options.hosts
        self.leaders = [ranks[write % len(ranks)] for ranks in self.hosts]

    def emit(self) -> None:
        for ranks, leader in zip(self.hosts, self.leaders, strict=True):
            for buffer, rank in zip(self.sums.ranks, ranks, strict=False):
                self._put("gather", buffer, rank, [leader])
        for ranks, leader, buffer in zip(self.hosts, self.leaders, self.sums.hosts, strict=True):
            if len(ranks) > 1:
                self._sums("reduce_host", leader, self.sums.ranks[: len(ranks)], buffer)
        for leader, buffer in zip(self.leaders, self.sums.hosts, strict=True):
            self._put("exchange", buffer, leader, self.leaders)
        for leader in self.leaders:
            self._sums("reduce_hosts", leader, self.sums.hosts, self.sums.total)
        for ranks, leader in zip(self.hosts, self.leaders, strict=True):
            self._put("broadcast", self.sums.total, leader, ranks)

    def _put(self, step: str, buffer: Buffer, rank: int, targets: list[int] | range) -> None:
        """Puts of a buffer from `rank` to the same place on `targets`. Several workers share them."""
        for number, target in enumerate(other for other in targets if other != rank):
            self.graph.add(
                Put(
                    rank=rank,
                    op=f"{self.name}.{step}",
                    worker=number % self.graph.num_workers,
                    src=buffer.at(rank),
                    dst=buffer.at(target),
                    batch=self.buffers.batch.at(rank),
                )
            )

    def _sums(self, step: str, rank: int, sources: tuple[Buffer, ...], into: Buffer) -> None:
        for worker, cols in self.partition.by_worker():
            self.graph.add(
                Sum(
                    rank=rank,
                    op=f"{self.name}.{step}",
                    worker=worker,
                    blocks=tuple(source.at(rank, *cols) for source in sources),
                    dst=into.at(rank, *cols),
                    batch=self.buffers.batch.at(rank),
                )
            )
