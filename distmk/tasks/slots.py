"""How many sequences a program has slots for, and how many rows of an iteration it samples at most.

Both are MAX_ROWS, or the number of sequences that the scheduler step runs at once if that is larger. A slab iteration
has at most MAX_ROWS rows, whatever the number of slots.
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
    """The maximum of rows in an iteration whose batch the scheduler step with arguments `step` makes for its own program."""
    return int(step.max_rows[step.program])


def sampled_rows_of(step: Any) -> int:
    """The maximum of sampled rows in an iteration whose batch the scheduler step with arguments `step` makes."""
    return slots_for(int(step.max_slots)) if rows_of_step(step) > MAX_ROWS else MAX_ROWS


def check_num_slots(args: Any) -> None:
    """Raise ValueError unless `args.num_slots` is the number of slots of some program."""
    require(MAX_ROWS <= args.num_slots <= MAX_SEQUENCES, "num_slots is out of range")


def check_slot_capacity(args: Any, step: Any) -> None:
    """Raise ValueError if the scheduler step uses more or fewer slots than the task."""
    require(args.num_slots == slots_for(step.max_slots), "num_slots is not that of the scheduler step")


def check_num_rows(num_rows: int) -> None:
    """Raise ValueError unless some program may sample that many rows of an iteration."""
    require(MAX_ROWS <= num_rows <= MAX_SEQUENCES, "the number of sampled rows is out of range")


def check_row_capacity(num_rows: int, step: Any) -> None:
    """Raise ValueError if the scheduler step samples more or fewer rows than the task."""
    require(num_rows == sampled_rows_of(step), "the number of sampled rows is not that of the scheduler step")


def row_accesses(rank: int, args: Any) -> list[Access]:
    """The read of a batch with its sampled rows. The batch is a `JobBatch` if `args.is_job_batch`."""
    require(args.batch != 0, "there is no batch")
    require(args.is_job_batch <= 1, "a flag is neither 0 nor 1")
    return batch_accesses(bool(args.is_job_batch), rank, args.batch)


def check_batch_kind(args: Any, step: Any) -> None:
    """Raise ValueError if the scheduler step makes a batch of another kind."""
    require(bool(args.is_job_batch) == (rows_of_step(step) > MAX_ROWS), "the batch is of the other kind")


def check_sampling_capacity(args: Any, step: Any) -> None:
    """Raise ValueError if the scheduler step has other slots, sampled rows or batches than the task."""
    check_slot_capacity(args, step)
    check_row_capacity(args.num_rows, step)
    check_batch_kind(args, step)
