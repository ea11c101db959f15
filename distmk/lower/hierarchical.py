"""The all-reduce across hosts: few messages between hosts, and the same order of additions on every rank.

Each host has a leader for each block of columns; leaders rotate over its ranks from block to block.

1. Every rank puts its block of partial sums to the leader on its host (`gather`).
2. The leader adds up its host's partial sums in rank order (`reduce_host`). Where a rank is alone, its own are the sum.
3. It puts the host's sum to the leader of every other host (`exchange`): one message for each pair of hosts and block.
4. Each leader adds up the hosts' sums in the order of the hosts (`reduce_hosts`): the total, with the same bits on all hosts.
5. It puts the total to the other ranks of its host (`broadcast`), and a Sum task on each adds it to the residual stream.

Slots on each rank: partial sums of its host's ranks, sums of the hosts, the total. They are ordered by events alone, since
polling would save little of the time of a message. Two successive all-reduces have slots of their own, so that no rank needs a
message to know that its last one has been read: the reply in the all-reduce between says so.

Source: hierarchical all-reduce (Jia et al., "Highly scalable deep learning training system", arXiv:1807.11205).
"""

from __future__ import annotations

from collections.abc import Iterator

from distmk.graph.graph import Graph
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.partition import Partition
from distmk.lower.plan import WorkPlan
from distmk.model.shards import Range
from distmk.tasks import Put, Sum


def partial_slot(plan: WorkPlan, rank: int) -> int:
    """The slot of the partial sums of `rank`: that of its host's sum, if no other rank adds to it."""
    host = next(host for host, ranks in enumerate(plan.options.hosts) if rank in ranks)
    ranks = plan.options.hosts[host]
    return rank - ranks.start if len(ranks) > 1 else _host_slot(plan, host)


def emit_total(
    graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, name: str, write: int, partition: Partition
) -> None:
    """The tasks behind `name` that leave the total of every block in the last slot of every rank."""
    _Emitter(graph, plan, buffers, name, write, partition).emit()


def _leader(ranks: range, worker: int) -> int:
    """The rank among those of a host that leads the block that `worker` computes."""
    return ranks[worker % len(ranks)]


def _host_slot(plan: WorkPlan, host: int) -> int:
    return plan.max_host_size + host


class _Emitter:
    """Emits all tasks of a step before those of the next, as a worker runs its tasks in the order in which they are emitted."""

    def __init__(
        self, graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, name: str, write: int, partition: Partition
    ) -> None:
        self.graph, self.plan, self.buffers = graph, plan, buffers
        self.name, self.write, self.partition = name, write, partition
        self.hosts = plan.options.hosts
        self.host_slots = tuple(_host_slot(plan, host) for host in range(len(self.hosts)))
        self.total_slot = plan.num_slots - 1

    def emit(self) -> None:
        for _, ranks, worker, cols in self._blocks():
            for slot, rank in enumerate(ranks):
                if rank != _leader(ranks, worker):
                    self._put("gather", rank, _leader(ranks, worker), worker, cols, slot)
        for host, ranks, worker, cols in self._blocks():
            if len(ranks) > 1:
                slots = tuple(range(len(ranks)))
                self._sum("reduce_host", _leader(ranks, worker), worker, cols, slots, self.host_slots[host])
        for host, ranks, worker, cols in self._blocks():
            for other in self.hosts:
                if other != ranks:
                    source, target = _leader(ranks, worker), _leader(other, worker)
                    self._put("exchange", source, target, worker, cols, self.host_slots[host])
        for _, ranks, worker, cols in self._blocks():
            self._sum("reduce_hosts", _leader(ranks, worker), worker, cols, self.host_slots, self.total_slot)
        for _, ranks, worker, cols in self._blocks():
            leader = _leader(ranks, worker)
            for rank in ranks:
                if rank != leader:
                    self._put("broadcast", leader, rank, worker, cols, self.total_slot)

    def _blocks(self) -> Iterator[tuple[int, range, int, Range]]:
        """(host, its ranks, worker, columns) of every block of every host."""
        for host, ranks in enumerate(self.hosts):
            for worker, cols in self.partition.by_worker():
                yield host, ranks, worker, cols

    def _sum(self, step: str, rank: int, worker: int, cols: Range, slots: tuple[int, ...], into: int) -> None:
        self.graph.add(
            Sum(
                rank=rank,
                op=f"{self.name}.{step}",
                worker=worker,
                blocks=tuple(self.buffers.block(self.write, rank, slot, cols) for slot in slots),
                dst=self.buffers.block(self.write, rank, into, cols),
                batch=self.buffers.batch.at(rank),
            )
        )

    def _put(self, step: str, rank: int, target: int, worker: int, cols: Range, slot: int) -> None:
        src = self.buffers.block(self.write, rank, slot, cols)
        self.graph.add(
            Put(
                rank=rank,
                op=f"{self.name}.{step}",
                worker=worker,
                src=src,
                dst=src.on(target),
                batch=self.buffers.batch.at(rank),
            )
        )
