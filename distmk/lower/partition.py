"""Partitions of an operator's rows, columns or slices over workers, one task a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distmk.abi import M_TILE
from distmk.model.shards import Range, partition

MIN_TASK_BYTES = 16384  # of weights; a smaller task costs more in events than the parallelism saves


@dataclass(frozen=True)
class Partition:
    """Consecutive ranges from 0 on, one per task. Worker `first_worker + i` runs the task of range i."""

    ranges: tuple[Range, ...]
    first_worker: int = 0

    @property
    def num_tasks(self) -> int:
        return len(self.ranges)

    def by_worker(self) -> Iterator[tuple[int, Range]]:
        """(worker, range) of each task."""
        return enumerate(self.ranges, self.first_worker)


def partition_items(total: int, item_bytes: int, num_workers: int) -> tuple[Range, ...]:
    """[0, total) for at most `num_workers` tasks, of at least MIN_TASK_BYTES each where there are that many bytes."""
    return partition(total, min(num_workers, total, max(1, total * item_bytes // MIN_TASK_BYTES)))


def partition_rows(num_rows: int, num_cols: int, num_workers: int) -> tuple[Range, ...]:
    """The rows of a bf16 matrix likewise, an even number to each task but perhaps the last.

    An odd number of rows of an odd number of bf16 columns would end in the middle of a 32-bit word.
    """
    pairs = partition_items((num_rows + 1) // 2, 4 * num_cols, num_workers)
    return tuple((2 * begin, min(2 * end, num_rows)) for begin, end in pairs)


def reduced_rows(num_rows: int, num_workers: int) -> int:
    """Rows in the reduced share of one worker of `num_workers`: about two thirds of an even share of `num_rows`.

    A multiple of M_TILE, the rows of a tensor core tile; 0 where that would be less than two tiles.
    """
    rows = round(2 * num_rows / (3 * num_workers * M_TILE)) * M_TILE
    return rows if rows >= 2 * M_TILE else 0


def partition_rows_reduced(num_rows: int, num_cols: int, num_workers: int, num_reduced: int) -> tuple[Range, ...]:
    """As `partition_rows`, but the first `num_reduced` tasks get `reduced_rows` each and the others share the rest."""
    if not num_reduced:
        return partition_rows(num_rows, num_cols, num_workers)
    size = reduced_rows(num_rows, num_workers)
    first = num_reduced * size
    reduced = tuple((begin, begin + size) for begin in range(0, first, size))
    rest = partition_rows(num_rows - first, num_cols, num_workers - num_reduced)
    return reduced + tuple((first + begin, first + end) for begin, end in rest)
