"""Writes of the residual stream: in place on a rank alone, else an all-reduce of the ranks' partial sums.

An all-reduce is one-shot: every task that computes columns of the residual stream pushes this rank's partial sums to its slot
on every rank (Epilogue.PUSH); a Sum task there adds up the slots in rank order, and adds that to the residual stream. A slot is
hidden_size * MAX_ROWS floats; columns [begin, end) of it are the floats [begin * MAX_ROWS, end * MAX_ROWS), of which the pushing
task fills [rows, end - begin].
"""

from __future__ import annotations

from typing import TypedDict

from distmk.abi import MAX_ROWS, Epilogue
from distmk.graph.graph import Graph
from distmk.graph.regions import Region
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.partition import Partition
from distmk.lower.plan import WorkPlan
from distmk.model.shards import Range
from distmk.tasks import Sum


class Bf16Output(TypedDict, total=False):
    """Operands of a task that writes columns of the residual stream: their bf16 copy, and the columns that it resets."""

    out_bf16: Region
    reset: Region | None


class ResidualOutput(Bf16Output):
    """Operands of a task that computes columns of the residual stream, or this rank's partial sums of them."""

    out: Region
    epilogue: Epilogue


def residual_output(
    plan: WorkPlan, buffers: DecodeBuffers, write: int, rank: int, cols: Range, in_place: Epilogue = Epilogue.ADD
) -> ResidualOutput:
    """Output operands for columns `cols` in write `write` of the residual stream.

    Without an all-reduce: the columns themselves, with epilogue `in_place`. Else: this rank's slot on every rank.
    """
    if plan.options.all_reduces:
        return {"out": _block(plan, buffers, write, rank, rank, cols), "epilogue": Epilogue.PUSH}
    return {"out": buffers.x.at(rank, *cols), "epilogue": in_place, **_bf16_output(buffers, write, rank, cols)}


def emit_all_reduce(
    graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, name: str, write: int, partition: Partition, *, add: bool
) -> None:
    """The sums over ranks behind `name`, of the columns `partition`; nothing on a rank alone.

    add: add to the residual stream instead of overwriting it.
    """
    if not plan.options.all_reduces:
        return
    for rank in plan.ranks:
        for worker, cols in partition.by_worker():
            graph.add(
                Sum(
                    rank=rank,
                    op=f"{name}.reduce",
                    worker=worker,
                    blocks=tuple(_block(plan, buffers, write, rank, source, cols) for source in plan.ranks),
                    dst=buffers.x.at(rank, *cols),
                    batch=buffers.batch.at(rank),
                    add=add,
                    polls=True,
                    **_bf16_output(buffers, write, rank, cols),
                )
            )


def _bf16_output(buffers: DecodeBuffers, write: int, rank: int, cols: Range) -> Bf16Output:
    x_bf16 = buffers.x_bf16
    return {"out_bf16": x_bf16.at(write).at(rank, *cols), "reset": x_bf16.reset_at(write, rank, *cols)}


def _block(plan: WorkPlan, buffers: DecodeBuffers, write: int, rank: int, source: int, cols: Range) -> Region:
    """The block of `cols` in the slot of rank `source`, on `rank`."""
    slot = source * MAX_ROWS * plan.config.hidden_size
    return buffers.slots_at(write).at(rank, slot + cols[0] * MAX_ROWS, slot + cols[1] * MAX_ROWS)
