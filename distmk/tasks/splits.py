"""A rank's attention heads, how the positions of a sequence are divided into splits, and the layout of their partials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmk.abi import (
    COMBINE_SLICE,
    COMBINE_WIDTH,
    FUSED_PARTIAL_HEADER,
    MAX_ROWS,
    PARTIAL_FLOATS,
    PLAIN_SCORES,
    POSITIONS_PER_PASS,
    Scores,
)
from distmk.errors import UsageError
from distmk.graph.task import Content, require

ANY_LENGTH = 2**31 - 1
KV_TILE = 16  # positions that a GPU's warp processes at once
MAX_KV_SPLITS = 32  # splits of a sequence: the combine gives each split a lane of one warp
FUSED_HEAD_ELEMENTS = 64  # fused combines take heads of this size times a power of two
MOST_HEADS = 2**16 - 1  # also elements of a head: arguments of tasks have 16 bits for both
LONG_SPLITS = (
    4  # times `min_kv_split_len`: with longer splits than that, a single row gets more than COMBINE_WIDTH of them
)
# Arguments that determine the splits.
SPLIT_FIELDS = ("head_dim", "max_kv_splits", "min_kv_split_len", "kv_split_budget", "window")


def num_slices(head_dim: int) -> int:
    """Slices of a head's output. Each has COMBINE_SLICE columns (the last one may have fewer) and is combined by itself."""
    return -(-head_dim // COMBINE_SLICE)


def slice_begin(index: int, head_dim: int) -> int:
    """First column of a slice; slices are numbered over all heads."""
    slices = num_slices(head_dim)
    return index // slices * head_dim + index % slices * COMBINE_SLICE


def partial_cols(max_kv_splits: int) -> int:
    """Floats of the partials of one slice of a query head: f32 [row, split, PARTIAL_FLOATS].

    A partial is the maximum of the scores, the sum of their exponentials, and the unnormalized output.
    """
    return MAX_ROWS * max_kv_splits * PARTIAL_FLOATS


def fused_combine_len(kv_split_budget: int, max_kv_splits: int, min_kv_split_len: int) -> int:
    """The most positions that a single decode row may see if its combine is fused into the o projection.

    Up to that length the row has at most COMBINE_WIDTH splits. Every task of the projection reads all partials of the
    row, so more splits would cost more than the saved hop. A row that sees more positions gets at least twice as many
    splits (csrc/runtime/splits.h rounds down to a multiple of COMBINE_WIDTH). That pays for the hop once a split has
    more than LONG_SPLITS * min_kv_split_len positions.
    """
    fewest_more = 2 * COMBINE_WIDTH
    longest = (fewest_more - 1) * LONG_SPLITS * min_kv_split_len
    return longest if min(kv_split_budget, max_kv_splits) >= fewest_more else ANY_LENGTH


def has_fused_combine(head_dim: int) -> bool:
    """Whether linear tasks can combine heads of this size. GPUs find a column's head from the bits of its number."""
    return head_dim >= FUSED_HEAD_ELEMENTS and not head_dim & (head_dim - 1)


def splits_content(name: str, args: Any) -> Content:
    """The content of partials: writer and readers compute the splits from these arguments."""
    return (name, *(getattr(args, field) for field in SPLIT_FIELDS), args.fused_combine_len)


def check_splits(args: Any) -> None:
    """Raise ValueError for arguments that define no splits."""
    require(args.head_dim > 0, "head_dim is 0")
    require(1 <= args.max_kv_splits <= MAX_KV_SPLITS, "max_kv_splits is out of range")
    require(args.min_kv_split_len > 0, "there are no splits")
    require(args.kv_split_budget > 0 or args.min_kv_split_len % KV_TILE == 0, "fixed splits are not of whole tiles")
    check_window(args)


def check_fixed_splits(args: Any, max_positions: int) -> None:
    """Raise ValueError if fixed splits do not cover sequences of `max_positions` positions."""
    covered = args.max_kv_splits * args.min_kv_split_len
    require(args.kv_split_budget > 0 or max_positions <= covered, "fixed splits do not cover a sequence")


def check_window(args: Any) -> None:
    """Raise ValueError for a window in which rows see no positions."""
    require(0 < args.window <= ANY_LENGTH, "window is out of range")


def most_seen(max_positions: int, window: int) -> int:
    """The most positions that the rows of one run see together, in sequences of up to `max_positions`."""
    return min(max_positions, window + MAX_ROWS - 1)


def fewest_splits(args: Any, max_seqs: int) -> int:
    """The fewest splits that a long sequence gets; beside other sequences it may be one."""
    return min(COMBINE_WIDTH, args.kv_split_budget, args.max_kv_splits) if max_seqs == 1 else 1


def fused_partial_bytes(args: Any, num_heads: int) -> int:
    """Bytes of the fused partials that a task writes or reads.

    Raises ValueError if its `fused_combine_len` does not fit its splits.
    """
    if args.fused_combine_len != fused_combine_len(args.kv_split_budget, args.max_kv_splits, args.min_kv_split_len):
        raise ValueError(f"fused_combine_len is {args.fused_combine_len}")
    require(has_fused_combine(args.head_dim), "a fused combine of heads that are no power of two from 64 on")
    return 2 * fused_partial_cols(num_heads, args.head_dim, args.max_kv_splits)


def fused_partial_cols(num_heads: int, head_dim: int, max_kv_splits: int) -> int:
    """bf16 elements of a single row's fused partials: [head, split, FUSED_PARTIAL_HEADER + head_dim]."""
    return num_heads * min(max_kv_splits, COMBINE_WIDTH) * (FUSED_PARTIAL_HEADER + head_dim)


@dataclass(frozen=True)
class AttentionShape:
    """One rank's attention heads and KV cache, the limits of its splits, and how rows attend.

    Query head h of this rank is head `q_begin + h` of the model and uses KV head `(q_begin + h) // group` of the model,
    which is KV head `(q_begin + h) // group - kv_begin` of this rank.
    """

    num_q: int
    num_kv: int
    head_dim: int
    group: int
    q_begin: int
    kv_begin: int
    page_size: int
    max_pages: int  # pages of one sequence
    num_pages: int  # pages of the cache
    max_kv_splits: int
    min_kv_split_len: int  # at most one split for each so many positions, rounded up; the length of fixed splits
    num_workers: int
    num_slots: int = MAX_ROWS  # rows of the page table
    window: int = ANY_LENGTH  # positions that a row sees, its own included
    scores: Scores = PLAIN_SCORES
    fixed_splits: bool = False  # splits do not depend on the rest of the batch (csrc/runtime/splits.h)

    def __post_init__(self) -> None:
        most = max(self.num_q, self.num_kv, self.group, self.head_dim)
        if most > MOST_HEADS:
            raise UsageError(f"{most} heads of a rank, or elements of a head, are more than {MOST_HEADS}")

    @property
    def kv_split_budget(self) -> int:
        """Splits of one KV head for all sequences together: enough for one instance per worker. 0: fixed splits."""
        return 0 if self.fixed_splits else max(1, self.num_workers // self.num_kv)

    def has_long_splits(self, max_model_len: int, max_seqs: int) -> bool:
        """Whether splits may have more than POSITIONS_PER_PASS positions, so that their keys and values are streamed.

        Fixed splits are never streamed: a streamed split is summed in another order.
        """
        longest = fewest_splits(self, max_seqs) * POSITIONS_PER_PASS
        return not self.fixed_splits and most_seen(max_model_len, self.window) > longest

    @property
    def fused_combine_len(self) -> int:
        """The most positions that a single row may see if its combine is fused."""
        return fused_combine_len(self.kv_split_budget, self.max_kv_splits, self.min_kv_split_len)

    @property
    def slices(self) -> int:
        """The number of slices of a head's output; each is combined by itself."""
        return num_slices(self.head_dim)

    def slice_begin(self, index: int) -> int:
        """First column of a slice; slices are numbered over all heads."""
        return slice_begin(index, self.head_dim)

    @property
    def partial_cols(self) -> int:
        """Floats of the partials of one slice of a query head."""
        return partial_cols(self.max_kv_splits)

    @property
    def num_partials(self) -> int:
        """Floats of all partials."""
        return self.num_q * self.slices * self.partial_cols

    @property
    def fused_partial_cols(self) -> int:
        """bf16 elements of a single row's fused partials."""
        return fused_partial_cols(self.num_q, self.head_dim, self.max_kv_splits)

    @property
    def cache_cols(self) -> int:
        """bf16 elements of one layer's K (or V) cache."""
        return self.num_pages * self.num_kv * self.page_size * self.head_dim

    @property
    def qkv_cols(self) -> int:
        """Columns of the rank's queries, keys and values, one after another."""
        return (self.num_q + 2 * self.num_kv) * self.head_dim
