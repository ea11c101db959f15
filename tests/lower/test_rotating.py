"""Where vectors lie by turns: whoever writes one clears the one before it, and a place is clear when it is written again."""

from __future__ import annotations

import pytest

from distmk import Graph
from distmk.graph.regions import Buffer
from distmk.lower.rotating import RotatingBuffers


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("num_writes", range(2, 12))
def test_every_place_is_clear_before_it_is_written_again(num_writes: int, lag: int) -> None:
    turns = RotatingBuffers(Graph(1), "x", 8, 4, num_writes, lag=lag)
    if num_writes <= lag:
        return assert_one_place(turns)
    full: list[Buffer] = []  # what was written last, the newest at the end
    first = []
    for iteration in range(3):
        for write in range(num_writes):
            turns.turn()
            reset = turns.reset_at(0, 2, 6)
            assert reset is not None and (reset.begin, reset.end) == (2, 6)
            if len(full) == lag:
                assert full[0] is reset.buffer, "what was written `lag` turns ago"
            assert turns.buffer not in [*full, reset.buffer]
            full = [*full, turns.buffer][-lag:]
            if iteration == 0:
                first.append(turns.buffer)
            # The graph of one iteration stands for all of them.
            assert turns.buffer is first[write]
    assert all(buffer.lamport and (buffer.rows, buffer.cols, buffer.dtype) == (4, 8, "bf16") for buffer in full)
    assert len(set(first)) == lag + 1 + num_writes % (lag + 1)


def assert_one_place(turns: RotatingBuffers) -> None:
    turns.turn()
    assert turns.reset_at(0) is None and not turns.buffer.lamport


def test_what_is_written_once_lies_in_one_place() -> None:
    """It would have to clear itself."""
    assert_one_place(RotatingBuffers(Graph(1), "x", 8, 4, 1))
