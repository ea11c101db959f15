"""The buffers of a program whose tasks are jobs: activations of all rows, and partial sums on the rank that owns each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distmk.abi import (
    ACTIVATION_BLOCK_COLS,
    MAX_BUCKET_ROWS,
    MAX_K_SPLITS,
    ROW_SHARE_FLOATS,
    ActivationLayout,
    Space,
)
from distmk.formats import WeightFormat, find_format
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.lower.buffers import ProgramBuffers, declare_buffers
from distmk.lower.options import Bucket
from distmk.lower.packed import input_formats, is_packed
from distmk.lower.plan import WorkPlan
from distmk.model.operators import Head, Mlp, SelfAttention
from distmk.tasks.activations import activation_cols, owned_rows, padded_cols


@dataclass(frozen=True)
class Operand:
    """Activations that a row-parallel product multiplies.

    If a rank's shard begins inside of a group of the matrix's format, they begin with as many columns of zeros as the
    matrix has columns of other ranks.

    leads: by rank, the number of these columns: whole blocks.
    """

    buffer: Buffer
    layout: ActivationLayout
    leads: tuple[int, ...]

    def written(self, rank: int) -> Region:
        """The rank's own columns and those behind them."""
        return self.buffer.at(rank, activation_cols(self.leads[rank], bool(self.layout)))

    def read(self, rank: int) -> Region:
        return self.buffer.at(rank)


@dataclass(frozen=True)
class JobBuffers(ProgramBuffers):
    """The buffers of a program whose tasks are jobs, sized for the rank with the largest shard.

    Each buffer has a single writer and is read before it is written again, so none rotates. Activations have a layout
    of `distmk.tasks.activations`. A rank holds only its own rows of the residual stream and of the parts.

    x: f32 [owned rows, hidden_size], the residual stream.
    normalized_x: activations of hidden_size columns, x / rms(x) of all rows.
    lane_x: the same times the weight of the norm, for packed weights on GPUs.
    parts: f32 [owned rows, ranks * parts_per_rank * hidden_size], the terms of a sum into the residual stream.
    qkv: bf16 [MAX_BUCKET_ROWS, q, k and v columns of a rank].
    q: bf16 [MAX_BUCKET_ROWS, query columns of a rank].
    attention_out, mlp_hidden: activations of the query and MLP columns of a rank, by the name of the format of the
      matrix that multiplies them.
    attention_shares: f32 [worker, ROW_SHARE_FLOATS], partials of attention where workers share a sequence; GPUs only.
    sampled_x: activations of hidden_size columns, used by the sampled rows, in the layout of the head.
    o_splits, down_splits: the number of parts of k into which a rank's o and down projections are split. Different
      instances multiply the parts, and each gives a term of the sum.
    """

    x: Buffer
    normalized_x: Buffer
    lane_x: Buffer | None
    parts: Buffer
    qkv: Buffer
    q: Buffer
    attention_out: Mapping[str, Operand]
    attention_shares: Buffer | None
    mlp_hidden: Mapping[str, Operand]
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
    reading = [found for op in plan.readers for found in input_formats(op)]
    head = next(op for op in plan.readers if isinstance(op, Head))

    def activations(name: str, num_cols: int, space: Space = Space.LOCAL) -> Buffer:
        return graph.buffer(name, activation_cols(num_cols, tiled), dtype="bf16", space=space)

    def rows(name: str, num_cols: int) -> Buffer:
        return graph.buffer(name, num_cols, rows=MAX_BUCKET_ROWS, dtype="bf16", space=Space.LOCAL)

    owned = owned_rows(graph.num_ranks)
    return JobBuffers(
        **vars(declare_buffers(graph, plan, bucket)),
        x=graph.buffer("job_x", hidden, rows=owned, space=Space.LOCAL),
        normalized_x=activations("job_normalized_x", hidden, from_peers),
        lane_x=activations("job_lane_x", hidden, from_peers) if tiled and any(map(is_packed, reading)) else None,
        parts=graph.buffer("job_parts", num_parts * hidden, rows=owned, space=from_peers),
        qkv=rows("job_qkv", max(shape.qkv_cols for shape in plan.shapes)),
        q=rows("job_q", max(q_cols)),
        attention_out=_operands(graph, plan, "job_attention_out", SelfAttention),
        attention_shares=_attention_shares(graph) if tiled else None,
        mlp_hidden=_operands(graph, plan, "job_mlp_hidden", Mlp),
        sampled_x=_sampled_x(graph, hidden, layout_for(plan, find_format(head.format))),
        o_splits=o_splits,
        down_splits=down_splits,
    )


def layout_for(plan: WorkPlan, found: type[WeightFormat]) -> ActivationLayout:
    """The layout of activations that matrices of a format multiply."""
    if not plan.options.tiled:
        return ActivationLayout.ROWS
    return ActivationLayout.LANE_TILES if is_packed(found) else ActivationLayout.TILES


def _operands(graph: Graph, plan: WorkPlan, name: str, kind: type[SelfAttention | Mlp]) -> dict[str, Operand]:
    """The operands of o (`kind` is SelfAttention) or of down (Mlp), by format.

    Formats share a buffer if their layout and their leads are the same.
    """
    shards, head_dim = plan.shards, plan.config.head_dim
    if kind is SelfAttention:
        formats = [op.o.format for op in plan.readers if isinstance(op, SelfAttention)]
        cols = [(shard.heads[0] * head_dim, shard.heads[1] * head_dim) for shard in shards]
    else:
        formats = [op.down.format for op in plan.readers if isinstance(op, Mlp)]
        cols = [shard.mlp for shard in shards]
    buffers: dict[tuple[ActivationLayout, tuple[int, ...]], Operand] = {}
    operands = {}
    for format_name in dict.fromkeys(formats):
        found = find_format(format_name)
        layout = layout_for(plan, found)
        leads = tuple(begin % found.group_cols if is_packed(found) and layout else 0 for begin, _ in cols)
        if (layout, leads) not in buffers:
            most = max(lead + end - begin for lead, (begin, end) in zip(leads, cols, strict=True))
            of_format = f"{name}_{format_name}" if layout is ActivationLayout.LANE_TILES else name
            buffer = graph.buffer(of_format, activation_cols(most, bool(layout)), dtype="bf16", space=Space.LOCAL)
            buffers[layout, leads] = Operand(buffer, layout, leads)
        operands[format_name] = buffers[layout, leads]
    return operands


def splits_of(num_cols: int, tiled: bool) -> int:
    """The number of splits of a product over `num_cols` columns.

    GPUs need them, as the rows alone make too few tiles for all SMs.
    """
    return min(MAX_K_SPLITS, padded_cols(num_cols) // ACTIVATION_BLOCK_COLS) if tiled else 1


def _attention_shares(graph: Graph) -> Buffer:
    return graph.buffer("job_attention_shares", ROW_SHARE_FLOATS, rows=graph.num_workers, space=Space.LOCAL)


def _sampled_x(graph: Graph, num_cols: int, layout: ActivationLayout) -> Buffer:
    """In tiles, a row of the buffer is a block of columns, and the sampled rows are at its beginning."""
    size, num_blocks = activation_cols(num_cols, bool(layout)), padded_cols(num_cols) // ACTIVATION_BLOCK_COLS
    num_blocks = num_blocks if layout else 1
    return graph.buffer("job_sampled_x", size // num_blocks, rows=num_blocks, dtype="bf16", space=Space.LOCAL)
