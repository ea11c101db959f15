"""Rotating buffers: a write resets the buffer of an older one, and a buffer is zero when it is written again."""

from __future__ import annotations

import pytest

from distmk import Graph
from distmk.graph.regions import Buffer
from distmk.lower.rotating import RotatingBuffers, Rotation


def declare(rotation: Rotation) -> RotatingBuffers:
    return RotatingBuffers.declare(Graph(1), "x", 8, rotation, rows=4)


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("num_writes", range(2, 12))
def test_a_buffer_is_reset_before_it_is_written_again(num_writes: int, lag: int, spare: int) -> None:
    """Three iterations of writes, each of which resets the buffer of `lag` writes ago."""
    rotation = Rotation(num_writes, lag, spare)
    if num_writes <= lag:
        return assert_one_buffer(rotation)
    buffers = declare(rotation)
    not_zero: list[Buffer] = []
    for _ in range(3):
        for write in range(num_writes):
            written, reset = buffers.at(write), buffers.reset_at(write, 0, 2, 6)
            assert reset is not None and (reset.begin, reset.end) == (2, 6)
            assert written not in not_zero and written is not reset.buffer
            if len(not_zero) == lag:
                assert not_zero.pop(0) is reset.buffer, f"not the buffer of {lag} writes ago"
            not_zero.append(written)
    assert all(buffer.lamport and (buffer.rows, buffer.cols, buffer.dtype) == (4, 8, "bf16") for buffer in not_zero)
    assert len({*buffers.buffers}) == rotation.num_buffers == lag + 1 + spare + num_writes % (lag + 1 + spare)


@pytest.mark.parametrize("num_writes", range(3, 12))
def test_a_spare_buffer_is_zero_a_write_earlier(num_writes: int) -> None:
    """Within an iteration; across its end all writes but the leftover ones keep their distance."""
    rotation = Rotation(num_writes, lag=1, spare=1)
    for write in range(2, num_writes):
        assert rotation.index_at(write) not in {rotation.index_at(write - 1), rotation.index_at(write - 2)}


@pytest.mark.parametrize("rotation", [Rotation(1), Rotation(2, lag=2)])
def test_too_few_writes_share_one_buffer(rotation: Rotation) -> None:
    """Each would have to reset the buffer that it fills."""
    assert_one_buffer(rotation)


def assert_one_buffer(rotation: Rotation) -> None:
    buffers = declare(rotation)
    assert len(buffers.buffers) == 1 and not buffers.at(0).lamport
    assert buffers.at(0) is buffers.at(1) and buffers.reset_at(0, 0) is None
