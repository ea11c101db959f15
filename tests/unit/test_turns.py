"""Where vectors lie by turns: whoever writes one clears the one before it, and a place is clear when it is written again."""

from __future__ import annotations

import pytest

from distmk import Graph
from distmk.regions import Buffer
from distmk.turns import Turns


@pytest.mark.parametrize("num_writes", range(2, 10))
def test_every_place_is_clear_before_it_is_written_again(num_writes: int) -> None:
    turns = Turns(Graph(1), "x", 8, 4, num_writes)
    full: set[Buffer] = set()
    first = []
    for iteration in range(3):
        for write in range(num_writes):
            turns.turn()
            cleared = turns.cleared_at(0, 2, 6)
            assert cleared is not None and (cleared.begin, cleared.end) == (2, 6)
            if iteration or write:
                assert full == {cleared.buffer}, "one place is full: what was written last"
            assert turns.buffer not in full | {cleared.buffer}
            full = {turns.buffer}
            if iteration == 0:
                first.append(turns.buffer)
            # The graph of one iteration stands for all of them.
            assert turns.buffer is first[write]
    assert all(buffer.arriving and (buffer.rows, buffer.cols, buffer.dtype) == (4, 8, "bf16") for buffer in full)
    assert len(set(first)) == 2 + num_writes % 2


def test_what_is_written_once_lies_in_one_place() -> None:
    """It would have to clear itself."""
    turns = Turns(Graph(1), "x", 8, 4, 1)
    turns.turn()
    assert turns.cleared_at(0) is None and not turns.buffer.arriving
