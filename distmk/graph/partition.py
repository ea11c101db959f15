"""Partitions of an operator's rows, columns or slices over workers; each task gets one range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from distmk.abi import M_TILE
from distmk.model.shards import Range

MIN_TASK_BYTES = 16384  # weights of a task; a smaller task costs more in events than the parallelism saves


@dataclass(frozen=True)
class Partition:
    """[0, total) in `num_tasks` ranges, one for each task.

    The first `num_reduced` have `reduced` items each; the others share the rest equally.

    Shares are equal in units of `step` items. C++ has the same formula (csrc/runtime/slabs.h), so that a task that
    works on a whole matrix knows its slabs. Worker `first_worker + i` runs the task of range i.
    """

    total: int
    num_tasks: int
    step: int = 1
    num_reduced: int = 0
    reduced: int = 0
    first_worker: int = 0

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The range of each task, in order."""
        first, num_others = self.num_reduced * self.reduced, self.num_tasks - self.num_reduced
        num_units = -(-(self.total - first) // self.step)
        begins = [i * self.reduced for i in range(self.num_reduced)]
        begins += [first + self.step * (num_units * i // num_others) for i in range(num_others)]
        return tuple(zip(begins, [*begins[1:], self.total], strict=True))

    @property
    def paired(self) -> Partition:
        """The partition of gate and up together: a task has both rows of each of its items."""
        return replace(self, total=2 * self.total, step=2 * self.step, reduced=2 * self.reduced)

    def by_worker(self) -> Iterator[tuple[int, Range]]:
        """(worker, range) of each task."""
        return enumerate(self.ranges, self.first_worker)


def partition_items(total: int, item_bytes: int, num_workers: int, first_worker: int = 0) -> Partition:
    """[0, total) for at most `num_workers` tasks. If there are enough bytes, each task has at least MIN_TASK_BYTES."""
    return Partition(total, _num_tasks(total, item_bytes, num_workers), first_worker=first_worker)


def partition_rows(
    num_rows: int, num_cols: int, num_workers: int, num_reduced: int = 0, first_worker: int = 0
) -> Partition:
    """The rows of a bf16 matrix for at most `num_workers` tasks.

    Each task has an even number of rows, except perhaps the last.

    An odd number of rows of an odd number of bf16 columns would end in the middle of a 32-bit word. The first
    `num_reduced` tasks get `reduced_rows` each, and the others share the rest.
    """
    reduced = reduced_rows(num_rows, num_workers) if num_reduced else 0
    num_pairs = (num_rows - num_reduced * reduced + 1) // 2
    num_tasks = num_reduced + _num_tasks(num_pairs, 4 * num_cols, num_workers - num_reduced)
    return Partition(num_rows, num_tasks, 2, num_reduced, reduced, first_worker)


def reduced_rows(num_rows: int, num_workers: int) -> int:
    """Rows in the reduced share of one of `num_workers` workers: about two thirds of an even share of `num_rows`.

    A multiple of M_TILE, the rows of a tensor core tile, or 0 if that would be less than two tiles.
    """
    rows = round(2 * num_rows / (3 * num_workers * M_TILE)) * M_TILE
    return rows if rows >= 2 * M_TILE else 0


def _num_tasks(total: int, item_bytes: int, num_workers: int) -> int:
    return min(num_workers, total, max(1, total * item_bytes // MIN_TASK_BYTES))
