"""What the tasks of a job iteration share: their batch, the layout of activations, and which rank owns a row.

A job iteration carries up to MAX_BUCKET_ROWS token rows. All its tasks are spread over the workers, and each worker
runs its share of the instances. Their activations are bf16. The packing of the weights that they are multiplied by
decides between three layouts (`ActivationLayout`):

- ROWS, one after another, with as many elements as there are columns;
- TILES: blocks of ACTIVATION_BLOCK_COLS columns, bf16 [blocks, MAX_BUCKET_ROWS, ACTIVATION_BLOCK_COLS], where the
  16-byte chunk c of row r is stored as chunk c ^ r % 8. This is the layout of a tensor-core operand in shared memory
  with a 128-byte swizzle;
- LANE_TILES, for packed weights: the same, with the columns of every 32 in the order of lanes. Pair j of chunk t is
  stored as pair t of chunk j, because lane t of a tensor-core operand has columns 8 t to 8 t + 7 of packed weights.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import ACTIVATION_BLOCK_COLS, MAX_BUCKET_ROWS, ActivationLayout, Batch, JobBatch, LaunchKind
from distmk.graph.regions import Region
from distmk.graph.task import Access, Content, Task, access, batch_access, require

JOB_BATCH: Content = ("job batch",)


class RowSet(enum.Enum):
    """The token rows of an iteration that a task works on."""

    ALL = "all"
    SAMPLED = "sampled"  # rows whose logits are wanted, as the first rows of a buffer
    OWNED = "owned"  # rows of the residual stream that the rank owns


@dataclass(frozen=True, eq=False)
class JobTask(Task):
    """A task of a job iteration. It is in the list of every worker, and each worker runs its share of the instances.

    rows: the rows that it works on. An instance is one row, unless the type says otherwise.
    """

    batch: Region = None  # type: ignore[assignment]
    launch: LaunchKind = LaunchKind.SPREAD
    rows: RowSet = RowSet.ALL

    loops_over_instances: ClassVar[bool] = True

    def max_instances(self) -> int:
        return MAX_BUCKET_ROWS

    @classmethod
    def num_instances(cls, args: Any) -> int:
        return MAX_BUCKET_ROWS


def job_batch_accesses(rank: int, batch: int, write: bool = False) -> list[Access]:
    """The whole batch metadata of a job iteration."""
    first = ctypes.sizeof(Batch)
    rest = access(write, rank, batch + first, ctypes.sizeof(JobBatch) - first, content=JOB_BATCH)
    return [batch_access(rank, batch, write), rest]


def batch_accesses(has_jobs: bool, rank: int, batch: int, write: bool = False) -> list[Access]:
    """The whole batch metadata of a slab or a job iteration."""
    return job_batch_accesses(rank, batch, write) if has_jobs else [batch_access(rank, batch, write)]


def padded_cols(num_cols: int) -> int:
    """Columns of activations, rounded up to whole blocks."""
    return -(-num_cols // ACTIVATION_BLOCK_COLS) * ACTIVATION_BLOCK_COLS


def activation_cols(num_cols: int, tiled: bool) -> int:
    """bf16 elements of the activations of a job iteration."""
    return MAX_BUCKET_ROWS * (padded_cols(num_cols) if tiled else num_cols)


def activation_access(
    write: bool, rank: int, operand: int, num_cols: int, tiled: int, num_rows: int = MAX_BUCKET_ROWS
) -> Access:
    """Activations of all rows; with fewer `num_rows`, of the sampled rows, which are the first of a buffer of the same size.

    tiled: an ActivationLayout.
    """
    require(tiled <= max(ActivationLayout), "activations have no known layout")
    content: Content = ("activations", int(num_cols), int(tiled))
    if tiled and num_rows < MAX_BUCKET_ROWS:
        blocks, block_bytes = padded_cols(num_cols) // ACTIVATION_BLOCK_COLS, 2 * ACTIVATION_BLOCK_COLS
        return access(
            write, rank, operand, num_rows * block_bytes, blocks, MAX_BUCKET_ROWS * block_bytes, content=content
        )
    num_bytes = 2 * activation_cols(num_cols, bool(tiled)) * num_rows // MAX_BUCKET_ROWS
    return access(write, rank, operand, num_bytes, content=content)


def owned_rows(num_ranks: int) -> int:
    """The most rows of the residual stream that one rank owns.

    An iteration's rows are divided into as many consecutive shares.
    """
    return -(-MAX_BUCKET_ROWS // num_ranks)


def check_batch(args: Any) -> None:
    """Raise ValueError for arguments without a batch."""
    require(args.batch != 0, "there is no batch")
