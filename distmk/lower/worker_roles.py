"""Workers with a special part in a layer: reserved for attention, with a reduced share of qkv, or allowed to poll.

If attention is in every worker's list ("spread"), the first workers run a single decode row's attention, one for each
split and KV head. The other workers have nothing to do in the meantime, so the rows of qkv and o are partitioned with
that in mind.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import COMBINE_WIDTH, M_TILE, POSITIONS_PER_PASS
from distmk.graph.partition import reduced_rows
from distmk.lower.options import DecodeOptions
from distmk.tasks import AttentionShape

BYTES_AHEAD = 256 << 10  # weights that an SM holds before they are needed: pipeline, and prefetched A fragments


@dataclass(frozen=True)
class WorkerRoles:
    """Numbers of workers, counted from worker 0.

    num_reserved: the first workers, which have no rows of qkv and o.
    num_reduced: the first workers, which have a reduced share of qkv. One of the two numbers is 0.
    num_polling: by rank, the first workers, which may poll Lamport buffers before their waits are met.
    """

    num_reserved: int
    num_reduced: int
    num_polling: tuple[int, ...]


def assign_roles(
    options: DecodeOptions,
    hidden_size: int,
    shapes: tuple[AttentionShape, ...],
    num_polling: tuple[int, ...],
    *,
    fuses_combine: bool,
    mlp_rotates: bool,
) -> WorkerRoles:
    """The roles on ranks whose attention has `shapes`.

    `fuses_combine`: the o projection combines a single row's splits. `mlp_rotates`: the MLP's activations have rotating
    buffers.
    """
    num_reserved = 0
    everyone_polls = all(num == options.num_workers for num in num_polling)
    # Without rotation all layers share one MLP buffer, and a worker without rows of o does not know when it has been
    # read.
    if options.all_reduces and fuses_combine and everyone_polls and mlp_rotates:
        num_reserved = _num_reserved(options, hidden_size, shapes)
    num_reduced = _num_reduced(options, shapes) if fuses_combine and not num_reserved else 0
    return WorkerRoles(num_reserved, num_reduced, num_polling)


def single_row_workers(shapes: tuple[AttentionShape, ...]) -> int:
    """The number of workers that a single decode row's attention occupies while its sequence is short.

    They are the first workers.
    """
    return max(shape.num_kv for shape in shapes) * COMBINE_WIDTH


def _num_reserved(options: DecodeOptions, hidden_size: int, shapes: tuple[AttentionShape, ...]) -> int:
    """The number of workers without rows of qkv and o.

    With such rows they would start attention late, and o later than the other workers.

    At least the workers that a single row's attention occupies, unless they are more than a third of all workers. Up to
    that third, also the workers that qkv and o can spare. Only with all-reduces: without them the same worker must add
    o and down to a column of the residual stream, so that it needs no event between the two.
    """
    if options.num_reserved is not None:
        return options.num_reserved
    busy, most = single_row_workers(shapes), options.num_workers // 3
    if busy > most:
        return 0
    others = options.num_workers - busy
    return min(most, options.num_workers - _fewest_workers(options, hidden_size, shapes, others))


def _fewest_workers(
    options: DecodeOptions, hidden_size: int, shapes: tuple[AttentionShape, ...], num_workers: int
) -> int:
    """The least number of workers, up to `num_workers`, with which qkv and o take no longer than with `num_workers`.

    On GPUs that holds as long as no worker gets more M tiles and each one's weights are in its pipeline before the
    inputs arrive. Fewer workers mean that fewer poll, and that combine tasks find a worker with nothing else to do.
    """
    if not options.tiled:
        return num_workers
    num_rows = (hidden_size, *(shape.qkv_cols for shape in shapes))
    for_tiles = max(-(-rows // _rows_of_tiles(rows, num_workers)) for rows in num_rows)
    num_weights = max(hidden_size * (shape.qkv_cols + shape.num_q * shape.head_dim) for shape in shapes)
    return min(num_workers, max(for_tiles, -(-2 * num_weights // BYTES_AHEAD)))


def _rows_of_tiles(num_rows: int, num_workers: int) -> int:
    """The rows of the M tiles that each of `num_workers` workers needs for its share of `num_rows`."""
    return -(-num_rows // (num_workers * M_TILE)) * M_TILE


def _num_reduced(options: DecodeOptions, shapes: tuple[AttentionShape, ...]) -> int:
    """Workers with a reduced share of qkv, because they read no weights while they run the only sequence's attention.

    Zero if there may be several sequences or a long one: then all workers have some attention to run.
    """
    busy = single_row_workers(shapes)
    is_short = options.max_model_len <= 2 * COMBINE_WIDTH * POSITIONS_PER_PASS
    has_rows = all(reduced_rows(shape.qkv_cols, options.num_workers) for shape in shapes)
    return busy if options.max_seqs == 1 and is_short and has_rows and 2 * busy <= options.num_workers else 0
