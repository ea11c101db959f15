"""Compile-time options of a decode program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from distmk.abi import MAX_BUCKET_ROWS, MAX_PROGRAMS, MAX_ROWS, MAX_SEQUENCES, LaunchKind
from distmk.drafters import Drafter
from distmk.errors import UsageError
from distmk.formats import FORMATS, find_format
from distmk.graph.hosts import host_ranks
from distmk.lower.packed import CUT_BLOCKS, shards_fit_jobs
from distmk.model.operators import Embedding, Model
from distmk.tasks.slots import slots_for
from distmk.tasks.splits import KV_TILE, MAX_KV_SPLITS

ATTENTION_LAUNCHES = {"massive": LaunchKind.MASSIVE, "spread": LaunchKind.SPREAD}


@dataclass(frozen=True)
class Bucket:
    """The row bucket of one program: how many rows its iterations have at most.

    program: its number. max_rows: the most token rows of an iteration. num_sampled: the most of these rows that are
    sampled.
    """

    program: int
    max_rows: int
    num_sampled: int

    @property
    def has_jobs(self) -> bool:
        """Whether tasks are jobs of whole matrices that all workers share (`lower/jobs.py`), not one slab per worker."""
        return self.max_rows > MAX_ROWS


@dataclass(frozen=True)
class DecodeOptions:
    """Compile-time options of a decode program. Raises UsageError for values out of range.

    num_schedulers: per rank; None: one per worker.
    max_seqs: the number of sequences that run at once, at most the rows of the largest bucket. A slab iteration carries
      up to MAX_ROWS tokens even if there are fewer sequences, so that it reads several tokens of a prompt.
    max_model_len: tokens of one sequence, prompt and output together.
    page_size: KV cache positions of a page, a power of two.
    num_pages: KV cache pages of all sequences, at least enough for one sequence of `max_model_len`; 0: enough for
      `max_seqs` of these.
    max_kv_splits, min_kv_split_len: the most splits of a sequence's KV positions. A sequence gets at most one split per
      min_kv_split_len positions, rounded up.
    deterministic: the arithmetic of a row depends neither on other rows nor on how its prompt is divided. There is only
      the bucket of MAX_ROWS, and a sequence is divided into splits of `fixed_split_len` positions.
    keep_logits: store the logits of all sampled rows, not only of the rows whose sampling needs them.
    tiled: pack matrices in the tiles that a GPU streams.
    folds_factors: multiply norm weights and scales into the matrices when they are loaded. Otherwise tasks multiply
      activations and sums by them, for weight formats that cannot take a factor per column. None: the formats of the
      model's matrices decide (`settle_factors`). With `tiled` it is never False: each matrix is multiplied whose format
      takes factors, and the tasks of the others multiply for themselves.
    attention_launch: "massive": schedulers dispatch attention's instances once the lengths are known. "spread":
      attention is in the list of every worker, which takes its share.
    num_reserved: with several ranks, workers without rows of qkv and o, reserved for a single decode row's attention.
      None: the workers that this attention occupies, and up to a third of all workers those that qkv and o can spare;
      none if it occupies more than that third (`worker_roles`).
    loopback: a single rank runs the all-reduces with itself, so that they can be developed on one GPU.
    row_buckets: by program, the most token rows that an iteration carries, in ascending order. The smallest bucket that
      holds an iteration's rows runs it. Across hosts there is only the bucket of MAX_ROWS.
    drafter: proposes tokens, which an iteration verifies. None: an iteration gives a sequence one token.
    draft_row_cost: the time that one more row takes, as a share of an iteration of one row.
    host_sizes: for each host, the number of consecutive ranks on it. Ranks of a host share memory; all-reduces between
      hosts are hierarchical. () or one number: all ranks share memory.
    """

    num_ranks: int = 1
    num_workers: int = 1
    num_schedulers: int | None = None
    max_seqs: int = MAX_ROWS
    max_model_len: int = 2048
    page_size: int = 16
    num_pages: int = 0
    max_kv_splits: int = MAX_KV_SPLITS
    min_kv_split_len: int = 64
    deterministic: bool = False
    keep_logits: bool = False
    tiled: bool = False
    folds_factors: bool | None = None
    attention_launch: Literal["massive", "spread"] = "massive"
    num_reserved: int | None = None
    loopback: bool = False
    row_buckets: tuple[int, ...] = (MAX_ROWS,)
    host_sizes: tuple[int, ...] = ()
    drafter: Drafter | None = None
    draft_row_cost: float = 0.0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 1:
            raise UsageError(f"{self.num_ranks} ranks of {self.num_workers} workers; at least one of each is needed")
        if not 1 <= self.max_seqs <= MAX_SEQUENCES:
            raise UsageError(f"max_num_seqs is {self.max_seqs}; 1 to {MAX_SEQUENCES} sequences can run at once")
        if self.max_model_len < 1 or self.page_size < 1 or self.max_kv_splits < 1 or self.min_kv_split_len < 1:
            raise UsageError("max_model_len, page_size, max_kv_splits and min_kv_split_len must be positive")
        if self.page_size & (self.page_size - 1) or self.max_kv_splits > MAX_KV_SPLITS:
            raise UsageError(f"page_size must be a power of two, and max_kv_splits at most {MAX_KV_SPLITS}")
        if self.num_pages and self.num_pages < self.max_pages:
            raise UsageError(
                f"num_pages is {self.num_pages}; a sequence of {self.max_model_len} tokens takes {self.max_pages} pages of "
                f"{self.page_size}"
            )
        if self.num_reserved is not None and not 0 <= self.num_reserved < self.num_workers:
            raise UsageError(
                f"num_reserved is {self.num_reserved}; of {self.num_workers} workers at least one must be left"
            )
        if self.attention_launch not in ATTENTION_LAUNCHES:
            raise UsageError(f"attention_launch is {self.attention_launch!r}; expected massive or spread")
        host_ranks(self.host_sizes, self.num_ranks)  # raises if the sizes do not fit the number of ranks
        if self.tiled and self.folds_factors is False:
            raise UsageError(
                "folds_factors is False, but GPUs and the emulator multiply matrices with their factors folded in; "
                "choose the host backend"
            )
        self._check_row_buckets()

    def _check_row_buckets(self) -> None:
        buckets = self.row_buckets
        if self.deterministic and buckets != (MAX_ROWS,):
            raise UsageError(f"row_buckets is {buckets}; with deterministic, every iteration carries {MAX_ROWS} rows")
        ascends = all(a < b for a, b in itertools.pairwise((MAX_ROWS - 1, *buckets, MAX_BUCKET_ROWS + 1)))
        if not 1 <= len(buckets) <= MAX_PROGRAMS or not ascends:
            raise UsageError(
                f"row_buckets is {buckets}; expected up to {MAX_PROGRAMS} ascending numbers from {MAX_ROWS} to {MAX_BUCKET_ROWS}"
            )
        most_rows = buckets[-1]
        if most_rows > MAX_ROWS and self.crosses_hosts:
            raise UsageError(f"row_buckets is {buckets}; across hosts an iteration carries {MAX_ROWS} rows")
        if self.max_seqs > most_rows:
            where = " across hosts" if self.crosses_hosts else ""
            raise UsageError(
                f"max_num_seqs is {self.max_seqs}; an iteration{where} carries {most_rows} tokens, one for each sequence, so "
                f"give at most {most_rows}"
            )

    @property
    def all_reduces(self) -> bool:
        """Whether the results of row-parallel products go through an all-reduce."""
        return self.num_ranks > 1 or self.loopback

    @property
    def hosts(self) -> tuple[range, ...]:
        """The ranks of each host."""
        return host_ranks(self.host_sizes, self.num_ranks)

    @property
    def crosses_hosts(self) -> bool:
        """Whether there are several hosts."""
        return len(self.hosts) > 1

    @property
    def fixed_split_len(self) -> int:
        """With `deterministic`, the positions of each split: `min_kv_split_len`, or more if `max_kv_splits` of these are too
        few.
        """
        least = max(self.min_kv_split_len, -(-self.max_model_len // self.max_kv_splits))
        return -(-least // KV_TILE) * KV_TILE

    @property
    def max_pages(self) -> int:
        """Pages of one sequence of `max_model_len`."""
        return -(-self.max_model_len // self.page_size)

    @property
    def total_pages(self) -> int:
        """KV cache pages of a rank."""
        return self.num_pages or self.max_pages * self.max_seqs

    @property
    def num_slots(self) -> int:
        """Slots for sequences: `max_seqs`, but at least MAX_ROWS. A job iteration may sample as many rows."""
        return slots_for(self.max_seqs)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The programs of a launch, in the order of their numbers."""
        return tuple(
            Bucket(program, max_rows, MAX_ROWS if max_rows <= MAX_ROWS else self.num_slots)
            for program, max_rows in enumerate(self.row_buckets)
        )

    @property
    def spreads_attention(self) -> bool:
        """Whether attention is in every worker's list."""
        return ATTENTION_LAUNCHES[self.attention_launch] is LaunchKind.SPREAD


def settle_factors(model: Model, options: DecodeOptions) -> DecodeOptions:
    """The options with `folds_factors` settled: factors are folded if the formats of all matrices take them, or on GPUs.

    UsageError: a matrix has an unknown format, one that GPUs cannot multiply or look up, or one that takes no factors
    although these are to be folded; or the row buckets are more than GPUs have for the shards of packed matrices.
    """
    folds = True
    embedding = next((op.table for op in model.operators if isinstance(op, Embedding)), None)
    for tensor, name in dict(model.matrix_formats).items():
        found = find_format(name, f"the weight format of {tensor}")
        if options.tiled and not found.runs_on_gpu:
            known = ", ".join(kind.name for kind in FORMATS.values() if kind.runs_on_gpu)
            raise UsageError(
                f"{tensor} is in {name}, which GPUs and the emulator do not multiply; their formats are {known}; "
                "choose the host backend"
            )
        if options.tiled and found.is_quantized and tensor == embedding:
            raise UsageError(
                f"{tensor} is in {name}, which GPUs and the emulator do not look up; choose the host backend"
            )
        if options.folds_factors and not found.folds_factors and not options.tiled:
            raise UsageError(f"folds_factors is True; {tensor} is in {name}, which takes no factors")
        folds = folds and (found.folds_factors or options.tiled)
    if options.tiled and options.row_buckets[-1] > MAX_ROWS and not shards_fit_jobs(model, options.num_ranks):
        raise UsageError(
            f"row_buckets is {options.row_buckets}; with {CUT_BLOCKS}, GPUs and the emulator have iterations of {MAX_ROWS} rows"
        )
    return replace(options, folds_factors=folds) if options.folds_factors is None else options
