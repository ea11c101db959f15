"""The buffers of a program whose tasks are jobs: activations of all rows, and partial sums on the rank that owns each row."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import ACTIVATION_BLOCK_COLS, MAX_BUCKET_ROWS, MAX_K_SPLITS, ROW_SHARE_FLOATS, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.lower.buffers import ProgramBuffers, declare_buffers
from distmk.lower.options import Bucket
from distmk.lower.plan import WorkPlan
from distmk.tasks.activations import activation_cols, owned_rows, padded_cols


@dataclass(frozen=True)
class JobBuffers(ProgramBuffers):
    """The buffers of a program whose tasks are jobs, sized for the rank with the largest shard.

    Each buffer has a single writer and is read before it is written again, so none rotates. Activations have a layout
    of `distmk.tasks.activations`. A rank holds only its own rows of the residual stream and of the parts.

    x: f32 [owned rows, hidden_size], the residual stream.
    normalized_x: activations of hidden_size columns, x / rms(x) of all rows.
    parts: f32 [owned rows, ranks * parts_per_rank * hidden_size], the terms of a sum into the residual stream.
    qkv: bf16 [MAX_BUCKET_ROWS, q, k and v columns of a rank].
    q: bf16 [MAX_BUCKET_ROWS, query columns of a rank].
    attention_out, mlp_hidden: activations of the query and MLP columns of a rank.
    attention_shares: f32 [worker, ROW_SHARE_FLOATS], partials of attention where workers share a sequence; GPUs only.
    sampled_x: activations of hidden_size columns, used by the sampled rows.
    o_splits, down_splits: the number of parts of k into which a rank's o and down projections are split. Different
      instances multiply the parts, and each gives a term of the sum.
    """

    x: Buffer
    normalized_x: Buffer
    parts: Buffer
    qkv: Buffer
    q: Buffer
    attention_out: Buffer
    attention_shares: Buffer | None
    mlp_hidden: Buffer
    sampled_x: Buffer
    o_splits: int
    down_splits: int

    @property
    def parts_per_rank(self) -> int:
        return max(self.o_splits, self.down_splits)

    def first_part_of(self, rank: int) -> int:
        """A rank's first part among the parts of all ranks."""
        return rank * self.parts_per_rank

    def parts_at(self, rank: int, hidden_size: int, num_k_splits: int) -> Region:
        """The first `num_k_splits` parts of a rank, in its own memory. They have the same place in its peers' memory."""
        first = self.first_part_of(rank)
        return self.parts.at(rank, first * hidden_size, (first + num_k_splits) * hidden_size)


def declare_job_buffers(graph: Graph, plan: WorkPlan, bucket: Bucket) -> JobBuffers:
    """Add the buffers of a program whose tasks are jobs to `graph`, and set its batch."""
    hidden, tiled = plan.config.hidden_size, plan.options.tiled
    q_cols = [shape.num_q * shape.head_dim for shape in plan.shapes]
    mlp_cols = [end - begin for begin, end in (shard.mlp for shard in plan.shards)]
    o_splits, down_splits = (splits_of(min(cols), tiled) for cols in (q_cols, mlp_cols))
    num_parts = graph.num_ranks * max(o_splits, down_splits)
    # Peers write the normalized rows that they own, and terms of sums.
    from_peers = Space.HEAP if graph.num_ranks > 1 else Space.LOCAL

    def activations(name: str, num_cols: int, space: Space = Space.LOCAL) -> Buffer:
        return graph.buffer(name, activation_cols(num_cols, tiled), dtype="bf16", space=space)

    def rows(name: str, num_cols: int) -> Buffer:
        return graph.buffer(name, num_cols, rows=MAX_BUCKET_ROWS, dtype="bf16", space=Space.LOCAL)

    owned = owned_rows(graph.num_ranks)
    return JobBuffers(
        **vars(declare_buffers(graph, plan, bucket)),
        x=graph.buffer("job_x", hidden, rows=owned, space=Space.LOCAL),
        normalized_x=activations("job_normalized_x", hidden, from_peers),
        parts=graph.buffer("job_parts", num_parts * hidden, rows=owned, space=from_peers),
        qkv=rows("job_qkv", max(shape.qkv_cols for shape in plan.shapes)),
        q=rows("job_q", max(q_cols)),
        attention_out=activations("job_attention_out", max(q_cols)),
        attention_shares=_attention_shares(graph) if tiled else None,
        mlp_hidden=activations("job_mlp_hidden", max(mlp_cols)),
        sampled_x=_sampled_x(graph, hidden, tiled),
        o_splits=o_splits,
        down_splits=down_splits,
    )


def splits_of(num_cols: int, tiled: bool) -> int:
    """The number of splits of a product over `num_cols` columns.

    GPUs need them, as the rows alone make too few tiles for all SMs.
    """
    return min(MAX_K_SPLITS, padded_cols(num_cols) // ACTIVATION_BLOCK_COLS) if tiled else 1


def _attention_shares(graph: Graph) -> Buffer:
    return graph.buffer("job_attention_shares", ROW_SHARE_FLOATS, rows=graph.num_workers, space=Space.LOCAL)


def _sampled_x(graph: Graph, num_cols: int, tiled: bool) -> Buffer:
    """If tiled, a row of the buffer is a block of columns, and the sampled rows are at its beginning."""
    size, num_blocks = activation_cols(num_cols, tiled), padded_cols(num_cols) // ACTIVATION_BLOCK_COLS if tiled else 1
    return graph.buffer("job_sampled_x", size // num_blocks, rows=num_blocks, dtype="bf16", space=Space.LOCAL)
