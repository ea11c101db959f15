"""Compile-time choices of a decode program, and how work is cut into tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distmk.abi import M_TILE, MAX_ROWS, LaunchKind
from distmk.errors import UsageError
from distmk.model.shards import deal

MAX_SPLITS = 32  # a lane each when they are merged
ATTENTION_LAUNCHES = {"massive": LaunchKind.MASSIVE, "spread": LaunchKind.SPREAD}
MIN_TASK_BYTES = 16384  # cutting finer costs more in events than it saves


@dataclass(frozen=True)
class DecodeOptions:
    """Compile-time choices of a decode program. Lengths are in tokens, `page_size` in positions.

    `max_seqs`: sequences at once. An iteration takes up to MAX_ROWS tokens of them, however few they are, so that prompts
    are read many tokens at a time.
    """

    num_ranks: int = 1
    num_workers: int = 1
    num_schedulers: int | None = None
    max_seqs: int = MAX_ROWS
    max_model_len: int = 2048
    page_size: int = 16
    num_pages: int = 0  # 0: enough for `max_seqs` full-length sequences
    max_splits: int = MAX_SPLITS
    min_split: int = 64
    keep_logits: bool = False
    tiled: bool = False  # pack matrices in tiles, as a GPU streams them
    # How attention, split by the lengths of the moment, comes to the workers: handed out once they are known, or in every
    # worker's list, each to take its share.
    attention_launch: Literal["massive", "spread"] = "massive"
    # Workers without a part of qkv and o, where ranks share a layer, as a single row's attention is theirs. None: as many as
    # that takes, if they are no more than a third.
    num_reserved: int | None = None
    # One rank pushes what ranks add up, to itself, and adds it up as several do: to work on that with one GPU.
    loopback: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 1:
            raise UsageError(f"{self.num_ranks} ranks of {self.num_workers} workers; at least one of each is needed")
        if not 1 <= self.max_seqs <= MAX_ROWS:
            raise UsageError(f"max_num_seqs is {self.max_seqs}; 1 to {MAX_ROWS} sequences can run at once")
        if self.max_model_len < 1 or self.page_size < 1 or self.max_splits < 1 or self.min_split < 1:
            raise UsageError("max_model_len, page_size, max_splits and min_split must be positive")
        if self.page_size & (self.page_size - 1) or self.max_splits > MAX_SPLITS:
            raise UsageError(f"page_size must be a power of two, and max_splits at most {MAX_SPLITS}")
        if self.num_reserved is not None and not 0 <= self.num_reserved < self.num_workers:
            raise UsageError(
                f"num_reserved is {self.num_reserved}; of {self.num_workers} workers at least one must be left"
            )
        if self.attention_launch not in ATTENTION_LAUNCHES:
            raise UsageError(f"attention_launch is {self.attention_launch!r}; expected massive or spread")

    @property
    def exchanges(self) -> bool:
        """Whether vectors that are sums over ranks are pushed and added up."""
        return self.num_ranks > 1 or self.loopback

    @property
    def max_pages(self) -> int:
        """Pages of one sequence of full length."""
        return -(-self.max_model_len // self.page_size)


def cut(total: int, item_bytes: int, num_workers: int) -> list[tuple[int, int]]:
    """Deal `total` items of `item_bytes` to at most `num_workers` tasks of a worthwhile size."""
    num_partials = min(num_workers, total, max(1, total * item_bytes // MIN_TASK_BYTES))
    return [deal(total, num_partials, part) for part in range(num_partials)]


def partition_rows(num_rows: int, num_cols: int, num_workers: int) -> list[tuple[int, int]]:
    """Deal the rows of a bf16 matrix likewise, in pairs: an odd number of odd rows would end between two words."""
    pairs = cut((num_rows + 1) // 2, 4 * num_cols, num_workers)
    return [(2 * begin, min(2 * end, num_rows)) for begin, end in pairs]


def reduced_rows(num_rows: int, num_workers: int) -> int:
    """Some two thirds of an even share of `num_rows`, in whole groups as a GPU multiplies them; 0 where that is less than two."""
    rows = round(2 * num_rows / (3 * num_workers * M_TILE)) * M_TILE
    return rows if rows >= 2 * M_TILE else 0


def partition_uneven(num_rows: int, num_cols: int, num_workers: int, num_reduced: int) -> list[tuple[int, int]]:
    """As `partition_rows`, but the first `num_reduced` of `num_workers` tasks get `reduced_rows`."""
    if not num_reduced:
        return partition_rows(num_rows, num_cols, num_workers)
    light = reduced_rows(num_rows, num_workers)
    first = num_reduced * light
    rest = partition_rows(num_rows - first, num_cols, num_workers - num_reduced)
    return [(begin, begin + light) for begin in range(0, first, light)] + [(first + a, first + b) for a, b in rest]
