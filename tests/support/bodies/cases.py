"""A case for every task body, shapes drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from support.bodies import drafts, linear, linear_jobs, residual_rows, sampling, small
from support.bodies.assignment import one_of_two_fuses_combine
from support.bodies.attention import attention, extreme_scores, long_splits
from support.bodies.attention_inputs import Heads
from support.bodies.attention_jobs import attention_jobs, random_decoding_runs, random_job_runs, random_long_runs
from support.bodies.board import Board, in_turn
from support.bodies.fused_combine import fused_combine
from support.bodies.packed_linear import product_of
from support.reference import Scoring

from distmk.abi import (
    GATED,
    MAX_BUCKET_ROWS,
    MAX_SEQUENCES,
    NO_TOKEN_ALLOWED,
    PENDING_TOKEN,
    ActivationLayout,
    DraftSource,
    Epilogue,
    Scores,
)
from distmk.tasks.packed_linear import GPU_FORMATS

Case = Callable[[], None]

PACKED_KINDS = (
    *(f"packed_linear {what}" for what in ("STORE", "ADD", "PUSH", "ARGMAX", "polls", *(each.name for each in GATED))),
    *(f"packed linear_jobs {what}" for what in ("STORE", "PARTS", "LOGITS", *(each.name for each in GATED))),
)
KINDS = (
    *PACKED_KINDS,
    *("linear STORE", "linear ADD", "linear PUSH", "linear ARGMAX"),
    *(f"{product} {epilogue.name}" for product in ("linear", "linear_jobs") for epilogue in GATED),
    *("linear polls", "linear rounding", "linear batch sizes", "scaled_linear"),
    *("nop", "embed STORE", "embed PUSH", "put", "affine", "sine", "sum", "post_norm", "sample"),
    *("count_tokens", "sample_row", "accept_drafts", "propose_drafts", "verify_row"),
    *("attention", "general_attention", "fused combine"),
    *("append_kv", "attention_jobs"),
    *("embed_rows", "reduce_rows", "select_rows", "argmax_rows"),
    *("linear_jobs STORE", "linear_jobs PARTS", "linear_jobs LOGITS"),
)

# Kinds in which several ranks take part.
KINDS_BETWEEN_RANKS = (
    *(
        "linear PUSH",
        "packed_linear PUSH",
        "nop",
        "embed STORE",
        "embed PUSH",
        "put",
        "sample",
        "embed_rows",
        "reduce_rows",
    ),
    *("linear_jobs STORE", "linear_jobs PARTS", "linear_jobs LOGITS"),
)


FORMATS_PER_K = 3
"""Formats of packed weights that have a product of the same width."""


class Sizes(NamedTuple):
    """What a backend's shapes are drawn from, and how exact it is."""

    k: tuple[int, ...]
    n: tuple[int, ...]
    num_cols: tuple[int, ...]  # of activations of job iterations
    job_k: tuple[int, ...]
    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]
    max_len: int  # of a sequence, in tokens
    max_len_batch_1: int
    many_pages: int  # more than a block job of attention in jobs looks up at once
    linear_error: float  # relative to the magnitudes that are added up
    attention_error: float  # relative to the sum of the weights
    extreme_error: float  # absolute, of an output from scores in the hundreds
    repeats: int = 1  # how often shapes are drawn, on a single rank
    share: float = 1.0  # of the cases, drawn at random


HOST = Sizes(
    k=(1, 17, 63, 64, 250, 256, 576, 1000),
    n=(1, 3, 7, 16, 29),
    num_cols=(2, 18, 64, 250, 576, 1000),
    job_k=(17, 64, 250, 576),
    head_dims=(2, 6, 16, 64, 80, 128),
    page_sizes=(1, 4, 16),
    max_len=150,
    max_len_batch_1=2000,
    many_pages=300,
    linear_error=1e-6,
    attention_error=4e-5,
    extreme_error=5e-3,
    repeats=3,
)
# A GPU's square root and exponential are faster and less exact, and its tensor cores add up in another order.
CUDA = Sizes(
    k=(1, 17, 63, 256, 257, 512, 576, 768, 1000, 1024, 1536, 3072, 3584, 4096, 12288),
    n=(1, 3, 7, 15, 16, 17, 29, 48, 49, 100),
    num_cols=(64, 576, 1024, 3584),
    job_k=(64, 320, 576, 1536, 2112, 4096, 4160),
    head_dims=(16, 64, 80, 128),
    page_sizes=(1, 2, 16, 64),
    max_len=700,
    max_len_batch_1=3840,
    many_pages=3200,
    linear_error=4e-6,
    attention_error=5e-5,
    extreme_error=5e-3,
)
# The kernel's own arithmetic at the speed of a CPU.
EMULATED = CUDA._replace(
    k=(1, 63, 257, 576, 1000, 1536, 3072, 4352),
    job_k=(64, 320, 576, 2112),
    max_len=300,
    max_len_batch_1=1200,
    many_pages=450,
    share=0.3,
)

# Query heads that do not begin or end with a KV head's group, one query head a KV head, one KV head for all.
UNEVEN_HEADS = (Heads(4, 3, 5), Heads(8, 8), Heads(9, 3), Heads(3, 1, 2), Heads(20, 20), Heads(1, 4, 3))
# SmolLM2's on two ranks, Qwen3-8B's on four, one query head a KV head, one KV head for all, Gemma 2's on four ranks.
REAL_HEADS = (
    (Heads(5, 3, 4), 64),
    (Heads(8, 4, 8), 128),
    (Heads(3, 1, 2), 64),
    (Heads(16, 16), 128),
    (Heads(4, 2, 4), 256),
)
LARGE_HEAD_DIMS = (136, 192, 200, 256)  # more than a GPU's consumers have in their loop
# Of 64, 128 and 256 elements, in one block of columns and in two, and of four heads a KV head, up to eight, and more.
FUSED_HEADS = (
    (Heads(5, 3, 4), 64),
    (Heads(8, 4, 8), 128),
    (Heads(24, 4), 128),
    (Heads(13, 8, 3), 128),
    (Heads(12, 12), 128),
    (Heads(5, 3, 4), 256),
)


def add_all(board: Board, sizes: Sizes) -> None:
    """Every body of slab iterations, shuffled, so that a worker's queue has all kinds in a row."""
    _add(board, sizes, [*_linear(board, sizes), *_small(board), *_attention(board, sizes)])


def add_packed(board: Board, sizes: Sizes) -> None:
    """Products of packed weights, and the other bodies that share the pipeline with them."""
    others = [*_linear(board, sizes._replace(k=sizes.k[1::3])), *_attention(board, sizes)]
    _add(board, sizes, [*_packed_linear(board, sizes), *others])


def add_packed_jobs(board: Board, sizes: Sizes) -> None:
    """Products of packed weights in jobs, beside some of bf16 and the bodies that write their activations."""
    packed = linear_jobs.packed_cases(board, sizes.linear_error, GPU_FORMATS)
    others = linear_jobs.cases(board, sizes.linear_error, sizes.job_k[:2])
    _add(board, sizes, [*packed, *others, *_residual_rows(board, sizes, packed=True)])


def add_jobs(board: Board, sizes: Sizes) -> None:
    """Every body of job iterations that takes the place of the weights' pipeline in shared memory."""
    cases = linear_jobs.cases(board, sizes.linear_error, sizes.job_k)
    _add(board, sizes, [*cases, *_attention_jobs(board, sizes), *_residual_rows(board, sizes)])


def _add(board: Board, sizes: Sizes, cases: list[Case]) -> None:
    """Add the share of the cases that is drawn, in a random order, but of every kind one at least."""
    seen = set[object]()
    for index in board.rng.permutation(len(cases)):
        case = cases[index]
        kind = (case.func, *_choices(case.args)) if isinstance(case, partial) else ()
        if kind not in seen or board.rng.random() < sizes.share:
            case()
        seen.add(kind)


def _choices(arguments: Iterable[object]) -> Iterator[Epilogue | DraftSource | bool | str]:
    """The epilogues, kinds of products and choices of yes or no among the arguments of a case."""
    for each in arguments:
        if isinstance(each, (Epilogue, DraftSource, bool)):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from (product.kind for product in each if isinstance(product, linear_jobs.Product))


def _on_one(board: Board, case: Callable[..., None], *arguments: object) -> Case:
    """A case of one rank, on a rank drawn at random. No other rank takes part in it, so that of several ranks a third will do."""
    if board.num_ranks > 1 and board.rng.random() > 1 / 3:
        return lambda: None
    return partial(case, board, int(board.rng.integers(board.num_ranks)), *arguments)


def _repeats(board: Board, sizes: Sizes) -> int:
    return sizes.repeats if board.num_ranks == 1 else 1


def _linear(board: Board, sizes: Sizes) -> Iterator[Case]:
    rng, error = board.rng, sizes.linear_error

    def draws(*rows: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """(n, rows) for each range of rows; 0 rows: no batch."""
        for low, high in rows:
            yield int(rng.choice(sizes.n)), int(rng.integers(low, high))

    gated = in_turn(rng, GATED)
    for k in sizes.k * _repeats(board, sizes):
        for epilogue in (Epilogue.STORE, Epilogue.ADD, next(gated)):
            for n, rows in draws((0, 2), (2, 9), (9, 16), (16, 17)):
                yield _on_one(board, linear.columns, error, epilogue, k, n, rows)
        for n, rows in draws((0, 5), (5, 17)):
            yield partial(linear.push, board, error, k, n, rows)
        for n, rows in draws((0, 5), (5, 17)):
            yield _on_one(board, linear.argmax, error, k, n, rows)
        for n, rows in draws((0, 2), (0, 2), (2, 17)):
            yield _on_one(board, linear.polls, error, k, n, rows)
        for n, rows in () if board.gpu_layout else draws((0, 5), (5, 17)):
            yield _on_one(board, linear.scaled, error, k, n, rows)
    for rows in (0, 1, 7, 16):
        yield _on_one(board, linear.rounding, rows, int(rng.integers(2, 300)))
    yield _on_one(board, linear.ties)
    yield _on_one(board, linear.batch_sizes, int(rng.integers(300, 1200)), int(rng.integers(9, 60)))


def _packed_linear(board: Board, sizes: Sizes) -> Iterator[Case]:
    rng, error = board.rng, sizes.linear_error

    def draw(low: int, high: int) -> tuple[int, int]:
        return int(rng.choice(sizes.n)), int(rng.integers(low, high))

    gated, formats = in_turn(rng, GATED), in_turn(rng, GPU_FORMATS)
    for k in (k for k in sizes.k for _ in range(FORMATS_PER_K)):
        make = product_of(next(formats))
        for epilogue in (Epilogue.STORE, Epilogue.ADD, next(gated)):
            for rows in ((0, 2), (2, 9), (9, 17)):
                yield _on_one(board, linear.columns, error, epilogue, k, *draw(*rows), make)
        yield partial(linear.push, board, error, k, *draw(0, 17), make)
        yield _on_one(board, linear.argmax, error, k, *draw(0, 17), make)
        for rows in ((0, 2), (2, 17)):
            yield _on_one(board, linear.polls, error, k, *draw(*rows), make)


def _small(board: Board) -> Iterator[Case]:
    rng = board.rng
    for n, rows, add in product((1, 7, 64, int(rng.integers(1, 101))), (0, 1, 5, 16), (False, True)):
        yield _on_one(board, small.sum_of_blocks, n, rows, add)
    for rows in (0, 1, 9, 16):
        yield _on_one(board, small.post_norm, int(rng.choice([1, 63, 64, 600, 3000])), rows)
    for rows in (1, 1, 5, 16):
        for pushed in (False, True):
            yield partial(small.embed, board, rows, pushed)
    for _ in range(4):
        yield _on_one(board, small.affine)
        yield _on_one(board, small.sines)
    for rank, to in product(range(board.num_ranks), repeat=2):
        yield partial(small.nop, board, rank, to)
        for _ in range(2):
            yield partial(small.put, board, rank, to)
        yield partial(small.put_rows, board, rank, to, int(rng.integers(1, 17)))
    for num_tasks in (1, int(rng.integers(2, 40)), 132):
        yield _on_one(board, small.sample, num_tasks)
        yield _on_one(board, small.sample_jobs, num_tasks)
    for jobs in (False, True):
        for rank in range(1, board.num_ranks):
            yield partial(sampling.send_logits, board, rank, jobs)
        yield _on_one(board, sampling.count_tokens, jobs)
        for num_sections in (1, 3):
            yield _on_one(board, sampling.sample_row, num_sections, jobs)
        for undrawn in (PENDING_TOKEN, NO_TOKEN_ALLOWED):
            yield _on_one(board, sampling.sample_row, 2, jobs, undrawn)
        yield partial(drafts.accept, board, jobs)
        for source in DraftSource:
            yield partial(drafts.propose, board, source, jobs)
        for num_drafts in (0, 1, 4):
            yield partial(drafts.verify, board, num_drafts, jobs)


def _attention(board: Board, sizes: Sizes) -> Iterator[Case]:
    rng, error, max_len = board.rng, sizes.attention_error, sizes.max_len
    for head_dim, norms in product(sizes.head_dims * _repeats(board, sizes), (False, True)):
        heads = Heads(int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.integers(0, 9)))
        page_size, length = int(rng.choice(sizes.page_sizes)), int(rng.choice([20, max_len]))
        how = _random_scoring(rng, length)
        yield _on_one(board, attention, error, heads, head_dim, page_size, norms, length, how)
    yield _on_one(board, attention, error, Heads(4, 2, 1), 80, 16, True, max_len, Scoring(scores=Scores(0.2, 2.0)))
    large = int(rng.choice(LARGE_HEAD_DIMS))
    yield _on_one(board, attention, error, Heads(7, 4, 2), large, 16, False, 100, _random_scoring(rng, 100))
    for heads in UNEVEN_HEADS:
        yield _on_one(board, attention, error, heads, 16, 4, True, 70)
    for heads, head_dim in REAL_HEADS:
        yield _on_one(board, attention, error, heads, head_dim, 16, True, max_len, _random_scoring(rng, max_len))
    yield _on_one(board, attention, error, Heads(3, 3), 64, 16, False, max(900, max_len))
    yield _on_one(board, long_splits, error, int(rng.integers(390, 490)))  # 25 to 32 tiles: two rounds of two a warp
    yield _on_one(board, extreme_scores, 100, sizes.extreme_error)
    for heads, head_dim in FUSED_HEADS:
        for batch_1 in (True, True, True, False) if head_dim < 256 else (True,):
            how = _random_scoring(rng, max_len)
            yield _on_one(board, fused_combine, error, heads, head_dim, batch_1, max_len, how)
        longest = sizes.max_len_batch_1
        yield _on_one(board, fused_combine, error, heads, head_dim, True, longest, _random_scoring(rng, longest, 1000))
    for fused_first in (True, False):
        yield _on_one(board, one_of_two_fuses_combine, error, Heads(4, 2), 128, sizes.max_len_batch_1, fused_first)


def _random_scoring(rng: np.random.Generator, max_len: int, least: int = 1) -> Scoring:
    """A window of a few positions, or up to those of the longest sequence, or none; caps that matter and that hardly do."""
    window = int(rng.integers(least, rng.choice([least + 20, max_len + 1])))
    softcap, scale = float(rng.choice([1.0, 30.0])), float(rng.uniform(0.05, 0.3))
    has_window, has_scale, has_softcap = rng.random(3) < (2 / 3, 1 / 2, 1 / 4)
    scores = Scores(scale if has_scale else None, softcap if has_softcap else None)
    return Scoring(window if has_window else None, scores)


def _residual_rows(board: Board, sizes: Sizes, packed: bool = False) -> Iterator[Case]:
    """packed: activations for packed weights."""
    rng = board.rng
    for num_rows in (1, int(rng.integers(2, 17)), int(rng.integers(17, MAX_BUCKET_ROWS)), MAX_BUCKET_ROWS):
        k, tiled = int(rng.choice(sizes.num_cols)), int(board.gpu_layout or rng.integers(2))
        tiled = int(ActivationLayout.LANE_TILES) if packed else tiled
        yield partial(residual_rows.embed_and_sum, board, k, num_rows, tiled)
        for add in (False, True):
            yield partial(residual_rows.sums, board, int(rng.choice(sizes.num_cols)), num_rows, tiled, add)
        # Several columns a thread, of few rows.
        yield partial(
            residual_rows.sums, board, max(sizes.num_cols), int(rng.integers(1, 9)), tiled, True, behind_norm=True
        )
        yield _on_one(board, residual_rows.select, int(rng.choice(sizes.num_cols)), num_rows, tiled)
    for num_parts in (1, int(rng.integers(2, 30)), board.num_workers):
        yield _on_one(board, residual_rows.argmax, num_parts)


def _attention_jobs(board: Board, sizes: Sizes) -> Iterator[Case]:
    rng, max_len = board.rng, sizes.max_len
    for heads, head_dim, page_size, norms in (
        *((Heads(2, 1), 64, 16, False), (Heads(6, 3), 64, 16, True), (Heads(8, 4), 128, 16, True)),
        *((Heads(5, 3, 4), 64, 16, False), (Heads(4, 4, 8), 128, 8, False), (Heads(3, 3), 32, 16, True)),
        *((Heads(4, 2), 96, 16, True), (Heads(2, 2), int(rng.choice(sizes.head_dims[-3:])), 4, False)),
        *((Heads(4, 2, 2), 256, 16, True), (Heads(2, 2), int(rng.choice(LARGE_HEAD_DIMS)), 4, False)),
    ):
        runs, how = random_job_runs(rng, max_len), _random_scoring(rng, max_len)
        yield _on_one(board, attention_jobs, heads, head_dim, page_size, norms, runs, how)
    # Enough queries for the largest jobs, in the middle of a sequence; and few queries a run.
    chunk = (int(rng.integers(max_len // 3, max_len // 2)), 3, max_len)
    for how in (Scoring(), Scoring(int(rng.integers(1, max_len // 2)), Scores(softcap=5.0))):
        runs = [(1, 9, max_len - 5), chunk, (2, 0, 2)]
        yield _on_one(board, attention_jobs, Heads(16, 4), 64, 16, True, runs, how)
    for head_dim in (64, int(rng.choice(LARGE_HEAD_DIMS))):
        runs = [(40, 2, int(rng.integers(sizes.many_pages * 3 // 4, sizes.many_pages)))]
        yield _on_one(board, attention_jobs, Heads(2, 2), head_dim, 1, False, runs, Scoring())
    for head_dim in (64, 80, 128):
        group, page_size = int(rng.integers(1, 9)), int(rng.choice(sizes.page_sizes))
        heads = Heads(int(rng.integers(1, 2 * group + 1)), group, int(rng.integers(group)))
        rows, how = random_decoding_runs(rng, max_len, group), _random_scoring(rng, max_len)
        yield _on_one(board, attention_jobs, heads, head_dim, page_size, True, rows, how)
        rows, how = random_long_runs(rng, 3 * max_len, group), Scoring(scores=_random_scoring(rng, max_len).scores)
        yield _on_one(board, attention_jobs, heads, head_dim, page_size, False, rows, how)
    # As many as there can be, before a chunk of a prompt.
    lengths = [int(rng.integers(max_len)), *rng.integers(1, 30, MAX_SEQUENCES - 2)]
    rows = [(1, slot, int(length) + 1) for slot, length in enumerate(lengths)]
    rows.append((20, MAX_SEQUENCES - 1, 33))
    yield _on_one(board, attention_jobs, Heads(3, 2, 1), 32, 8, False, rows, _random_scoring(rng, max_len))
