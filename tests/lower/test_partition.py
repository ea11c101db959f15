"""Partitions cover everything once, in pieces worth a task."""

from __future__ import annotations

import itertools

import pytest

from distmk.abi import M_TILE
from distmk.graph.partition import MIN_TASK_BYTES, Partition, partition_items, partition_rows, reduced_rows


def sizes(partition: Partition, total: int) -> list[int]:
    """The sizes of ranges that cover [0, total) in order."""
    ends = [0, *(end for _, end in partition.ranges)]
    assert [begin for begin, _ in partition.ranges] == ends[:-1] and ends[-1] == total, "left out, or twice"
    assert len(partition.ranges) == partition.num_tasks
    return [end - begin for begin, end in partition.ranges]


@pytest.mark.parametrize("num_workers", [1, 7, 132])
@pytest.mark.parametrize("total", [1, 2, 131, 133, 4097])
def test_a_task_has_enough_bytes(total: int, num_workers: int) -> None:
    for item_bytes in (1, 100, MIN_TASK_BYTES - 1, MIN_TASK_BYTES):
        found = sizes(partition_items(total, item_bytes, num_workers), total)
        assert 1 <= len(found) <= num_workers and max(found) - min(found) <= 1
        assert len(found) == 1 or total * item_bytes >= len(found) * MIN_TASK_BYTES


@pytest.mark.parametrize("num_rows", [1, 2, 3, 331, 1152])
def test_tasks_have_an_even_number_of_rows(num_rows: int) -> None:
    for num_cols, num_workers in itertools.product((1, 577, 4096), (1, 5, 40)):
        assert not any(size % 2 for size in sizes(partition_rows(num_rows, num_cols, num_workers), num_rows)[:-1])


def test_reduced_shares_are_whole_tiles() -> None:
    rows, num_workers = 6144, 132
    size = reduced_rows(rows, num_workers)
    assert size == 2 * M_TILE, "two thirds of 46.5 rows, in whole tiles"
    found = sizes(partition_rows(rows, 4096, num_workers, num_reduced=64), rows)
    assert len(found) == num_workers and {*found[:64]} == {size} and {*found[64:]} == {60, 62}
    assert reduced_rows(num_workers * M_TILE, num_workers) == 0, "less than two tiles"


def test_paired_slabs_have_both_rows_of_every_item() -> None:
    partition = partition_items(187, MIN_TASK_BYTES, 5)
    assert partition.paired.ranges == tuple((2 * begin, 2 * end) for begin, end in partition.ranges)


def test_ranges_go_to_successive_workers() -> None:
    partition = Partition(5, 2, first_worker=4)
    assert [*partition.by_worker()] == [(4, (0, 2)), (5, (2, 5))]
