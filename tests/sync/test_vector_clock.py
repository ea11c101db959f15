"""Positions of nodes on their chains, and the clocks of waiters."""

from __future__ import annotations

import numpy as np
import pytest

from distmk.errors import UsageError
from distmk.sync.vector_clock import VectorClocks

# Worker 0 of rank 0 has tasks 0 and 2, which writes to several ranks; worker 1 of rank 1 has task 1; task 3 is dispatched.
PLACEMENTS = [(0, 0), (1, 1), (0, 0), (0, None)]


def clocks() -> VectorClocks:
    return VectorClocks(PLACEMENTS, 2, 2, np.array([False, False, True, False]))


def test_positions() -> None:
    """A task takes one position of its worker's chain, or two if it writes to several ranks; iteration 1 goes on behind. A
    dispatched task has a chain in each iteration.
    """
    made = clocks()
    assert made.num_chains == 4 + 2
    assert made.chain.tolist() == [0, 3, 0, 4, 0, 3, 0, 5]
    assert made.position.tolist() == [1, 1, 3, 1, 4, 2, 6, 1]
    assert made.early.tolist() == [1, 1, 2, 1, 4, 2, 5, 1]


def test_a_push_tells_less_than_the_end() -> None:
    made = clocks()
    made.settle(0)
    made.table[2] = made.table[0]
    made.settle(2)
    pushed, done = made.join([], [2]), made.join([2])
    assert pushed.tolist() == [2, 0, 0, 0, 0, 0] and done.tolist() == [3, 0, 0, 0, 0, 0]
    assert made.happened(0, pushed) and not made.happened(2, pushed) and made.happened(2, done)
    assert made.before_all([1], [2]).tolist() == [2, 0, 0, 1, 0, 0]


def test_a_list_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="a worker's queue is too long"):
        VectorClocks([(0, 0)] * 16384, 1, 1, np.ones(16384, np.bool_))
