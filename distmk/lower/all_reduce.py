"""Writes of the residual stream: in place if there is one rank, else an all-reduce of the ranks' partial sums.

If the operator has a post-norm, the vector y that it normalizes is written in the same way instead.

On one host an all-reduce is one-shot. Every task that computes columns of the residual stream pushes this rank's
partial sums to its block on every rank (Epilogue.PUSH). There, a Sum task adds up the blocks in rank order and adds the
result to the residual stream. A block is hidden_size * MAX_ROWS floats. Columns [begin, end) of it are the floats [begin
* MAX_ROWS, end * MAX_ROWS), of which the pushing task fills [rows, end - begin]. Across hosts the all-reduce is
hierarchical (`lower/hierarchical.py`).
"""

from __future__ import annotations

from distmk.abi import MAX_ROWS, Epilogue
from distmk.graph.graph import Graph
from distmk.graph.partition import Partition
from distmk.graph.regions import Buffer, Region
from distmk.lower.hierarchical import emit_total, partial_sums
from distmk.lower.plan import WorkPlan
from distmk.lower.slab_buffers import Bf16Output, SlabBuffers
from distmk.model.shards import Range
from distmk.tasks import Sum


class ResidualOutput(Bf16Output):
    """Output operands of a task that computes columns of the residual stream, or this rank's partial sums of them."""

    out: Region
    epilogue: Epilogue


def residual_output(
    plan: WorkPlan,
    buffers: SlabBuffers,
    write: int,
    rank: int,
    worker: int,
    cols: Range,
    *,
    in_place: Epilogue = Epilogue.ADD,
    into: Buffer | None = None,
) -> ResidualOutput:
    """Output operands of `worker` for columns `cols` in write `write` of the residual stream.

    Without an all-reduce the operands are the columns themselves, with epilogue `in_place`, or the columns of `into`,
    which is overwritten. With an all-reduce they are this rank's block on every rank; across hosts, on this rank alone.
    """
    if not plan.options.all_reduces and into:
        return {"out": into.at(rank, *cols), "epilogue": Epilogue.STORE}
    if not plan.options.all_reduces:
        return {
            "out": buffers.x.at(rank, *cols),
            "epilogue": in_place,
            **buffers.bf16_output(write, rank, worker, cols),
        }
    if plan.options.crosses_hosts:
        return {"out": partial_sums(plan, buffers, write, rank).at(rank, *cols), "epilogue": Epilogue.STORE}
    return {"out": _block(plan, buffers, write, rank, rank, cols), "epilogue": Epilogue.PUSH}


def emit_all_reduce(
    graph: Graph,
    plan: WorkPlan,
    buffers: SlabBuffers,
    name: str,
    write: int,
    partition: Partition,
    *,
    accumulates: bool,
    into: Buffer | None = None,
) -> None:
    """Emit the sums over ranks that follow the tasks of `name`, for the columns `partition`. A single rank needs none.

    accumulates: add to the residual stream instead of overwriting it. into: overwrite this buffer instead.
    """
    if not plan.options.all_reduces:
        return
    if plan.options.crosses_hosts:
        emit_total(graph, plan, buffers, name, write, partition)
    for rank in plan.ranks:
        for worker, cols in partition.by_worker():
            graph.add(
                Sum(
                    rank=rank,
                    op=f"{name}.reduce",
                    worker=worker,
                    blocks=_blocks(plan, buffers, write, rank, cols),
                    dst=(into or buffers.x).at(rank, *cols),
                    batch=buffers.batch.at(rank),
                    accumulates=accumulates and not into,
                    polls_blocks=not plan.options.crosses_hosts,
                    **({} if into else buffers.bf16_output(write, rank, worker, cols)),
                )
            )


def _blocks(plan: WorkPlan, buffers: SlabBuffers, write: int, rank: int, cols: Range) -> tuple[Region, ...]:
    """The blocks that a rank adds to columns `cols` of its residual stream: all ranks' blocks, or the total of all hosts."""
    if plan.options.crosses_hosts:
        return (buffers.host_sums_at(write).total.at(rank, *cols),)
    return tuple(_block(plan, buffers, write, rank, source, cols) for source in plan.ranks)


def _block(plan: WorkPlan, buffers: SlabBuffers, write: int, rank: int, source: int, cols: Range) -> Region:
    """The floats of `cols` in the block of rank `source`, on `rank`."""
    begin = source * MAX_ROWS * plan.config.hidden_size
    return buffers.allreduce_blocks_at(write).at(rank, begin + cols[0] * MAX_ROWS, begin + cols[1] * MAX_ROWS)
