"""How many sequences a program has slots for, and how many rows of an iteration it samples at most.

Both are MAX_ROWS, or as many as the scheduler step runs sequences at once if these are more. A slab iteration has no more than
MAX_ROWS rows, whatever the number of slots.
"""

from __future__ import annotations

from typing import Any

from distmk.abi import MAX_ROWS, MAX_SEQUENCES
from distmk.graph.task import Access, require
from distmk.tasks.activations import batch_accesses


def slots_for(max_seqs: int) -> int:
    """Slots of a program that runs up to `max_seqs` sequences at once."""
    return max(MAX_ROWS, max_seqs)


def rows_of_step(step: Any) -> int:
    """Rows that an iteration has at most whose batch the scheduler step with arguments `step` makes for its own program."""
    return int(step.max_rows[step.program])


def sampled_rows_of(step: Any) -> int:
    """Rows that are sampled at most in an iteration whose batch the scheduler step with arguments `step` makes."""
    return slots_for(int(step.max_slots)) if rows_of_step(step) > MAX_ROWS else MAX_ROWS


def check_num_slots(args: Any) -> None:
    """Raise ValueError unless `args.num_slots` is the number of slots of some program."""
    require(MAX_ROWS <= args.num_slots <= MAX_SEQUENCES, "num_slots is out of range")


def check_slot_capacity(args: Any, step: Any) -> None:
    """Raise ValueError if the scheduler step puts sequences into slots that the task does not know."""
    require(args.num_slots == slots_for(step.max_slots), "num_slots is not that of the scheduler step")


def check_num_rows(num_rows: int) -> None:
    """Raise ValueError unless so many rows of some program's iteration are sampled at most."""
    require(MAX_ROWS <= num_rows <= MAX_SEQUENCES, "the number of sampled rows is out of range")


def check_row_capacity(num_rows: int, step: Any) -> None:
    """Raise ValueError if the scheduler step has more rows sampled than the task."""
    require(num_rows == sampled_rows_of(step), "the number of sampled rows is not that of the scheduler step")


def row_accesses(rank: int, args: Any) -> list[Access]:
    """The read of a batch with its sampled rows, which is a `JobBatch` if `args.job_batch`."""
    require(args.batch != 0, "there is no batch")
    require(args.job_batch <= 1, "a flag is neither 0 nor 1")
    return batch_accesses(bool(args.job_batch), rank, args.batch)


def check_batch_kind(args: Any, step: Any) -> None:
    """Raise ValueError if the scheduler step makes the other kind of batch."""
    require(bool(args.job_batch) == (rows_of_step(step) > MAX_ROWS), "the batch is of the other kind")
