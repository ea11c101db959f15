"""A case for every task body, shapes drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from support.attention_inputs import Heads
from support.bodies import linear, small
from support.bodies.assignment import one_of_two_fuses_combine
from support.bodies.attention import attention
from support.bodies.board import Board
from support.bodies.fused_combine import fused_partials

from distmk.abi import Epilogue


class Sizes(NamedTuple):
    """What is drawn from, and how exact a backend is."""

    k: tuple[int, ...]
    n: tuple[int, ...]
    head_dims: tuple[int, ...]
    longest: int  # sequence, in tokens
    longest_lone: int  # of a row by itself
    linear_error: float  # in proportion to the magnitudes that are added up
    attention_error: float  # in proportion to the sum of the weights


HOST = Sizes((1, 17, 64, 250, 576), (1, 3, 16, 29), (16, 64, 80), 150, 2000, 1e-6, 2e-5)
# A GPU has a faster square root and exponential.
CUDA = Sizes(
    k=(1, 17, 63, 256, 257, 512, 576, 768, 1000, 1024, 1536, 3072, 3584, 4096, 12288),
    n=(1, 3, 7, 15, 16, 17, 29, 48, 49, 100),
    head_dims=(16, 64, 80, 128),
    longest=700,
    longest_lone=3840,
    linear_error=4e-6,
    attention_error=5e-5,
)
EMULATED = CUDA._replace(
    k=(1, 63, 257, 576, 1000, 1536, 3072, 4352), longest=300, longest_lone=1200
)  # a CPU takes its time
# SmolLM2's on two ranks, Qwen3-8B's on four, one query head a KV head, one KV head for all.
REAL_HEADS = ((Heads(5, 3, 4), 64), (Heads(8, 4, 8), 128), (Heads(3, 1, 2), 64), (Heads(16, 16), 128))

# Of 64 and 128 elements, in one block of columns and in two, and of four heads a KV head, up to eight, and more.
LONE_HEADS = (
    (Heads(5, 3, 4), 64),
    (Heads(8, 4, 8), 128),
    (Heads(24, 4), 128),
    (Heads(13, 8, 3), 128),
    (Heads(12, 12), 128),
)


def add_all(board: Board, sizes: Sizes) -> None:
    """Every body, shuffled, so that a worker's queue has all kinds in a row."""
    cases = [*_linear(board, sizes), *_small(board), *_attention(board, sizes)]
    for index in board.rng.permutation(len(cases)):
        cases[index]()


def _on_each(board: Board, case: Callable[..., None], *arguments: object) -> Callable[[], None]:
    """A case of one rank, on all of them."""

    def add() -> None:
        for rank in range(board.num_ranks):
            case(board, rank, *arguments)

    return add


def _linear(board: Board, sizes: Sizes) -> Iterator[Callable[[], None]]:
    rng, error = board.rng, sizes.linear_error

    def draws(*rows: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """(n, rows) for each range of rows; 0 rows: no batch."""
        for low, high in rows:
            yield int(rng.choice(sizes.n)), int(rng.integers(low, high))

    for k in sizes.k:
        for epilogue in (Epilogue.STORE, Epilogue.ADD, Epilogue.SWIGLU):
            for n, rows in draws((0, 2), (2, 9), (9, 16), (16, 17)):
                yield _on_each(board, linear.columns, error, epilogue, k, n, rows)
        for n, rows in draws((0, 5), (5, 17)):
            yield partial(linear.push, board, error, k, n, rows)
        for n, rows in draws((0, 5), (5, 17)):
            yield _on_each(board, linear.argmax, error, k, n, rows)
        for n, rows in draws((0, 2), (0, 2), (2, 17)):
            yield _on_each(board, linear.polls, error, k, n, rows)
    for rows in (0, 1, 7, 16):
        yield _on_each(board, linear.rounding, rows, int(rng.integers(2, 300)))
    yield _on_each(board, linear.ties)


def _small(board: Board) -> Iterator[Callable[[], None]]:
    for rows in (0, 1, 5, 16):
        yield _on_each(board, small.sum_of_blocks, rows)
        for pushed in (False, True):
            yield partial(small.embed, board, max(1, rows), pushed)
    for _ in range(4):
        yield _on_each(board, small.put_and_affine)
        yield _on_each(board, small.put_bytes)
        yield _on_each(board, small.sines)
    for num_tasks in (1, int(board.rng.integers(2, 40)), 132):
        yield _on_each(board, small.sample, num_tasks)


def _attention(board: Board, sizes: Sizes) -> Iterator[Callable[[], None]]:
    rng, last = board.rng, (sizes.longest,)
    for head_dim in sizes.head_dims:
        for norms in (False, True):
            heads = Heads(int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.integers(0, 9)))
            page_size = int(rng.choice([1, 2, 16, 64]))
            yield _on_each(board, attention, sizes.attention_error, heads, head_dim, page_size, norms, *last)
    for heads, head_dim in LONE_HEADS:
        for alone in (True, True, True, False):
            yield _on_each(board, fused_partials, sizes.attention_error, heads, head_dim, alone, *last)
        yield _on_each(board, fused_partials, sizes.attention_error, heads, head_dim, True, sizes.longest_lone)
    for fused_first in (True, False):
        sizes_of_row = (sizes.attention_error, Heads(4, 2), 128, sizes.longest_lone)
        yield _on_each(board, one_of_two_fuses_combine, *sizes_of_row, fused_first)
    for heads, head_dim in REAL_HEADS:
        if head_dim in sizes.head_dims:
            yield _on_each(board, attention, sizes.attention_error, heads, head_dim, 16, True, *last)
