"""The buffers of a wide program: activations of its own, and what it has in common with the narrow program."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from distmk.abi import MAX_WIDE_SPLITS, WIDE_COLS, WIDE_ROWS, Space
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region, Slab, Weight
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.plan import WorkPlan
from distmk.lower.sampling import WIDE, SamplingBuffers, share_sampling
from distmk.tasks.scheduling import candidates_bytes
from distmk.tasks.wide import activation_cols, owned_rows, padded_cols


@dataclass(frozen=True)
class WideBuffers:
    """The buffers of a wide program, of the size that the rank with the largest shard needs.

    Each has a single writer and is read before it is written again, so none rotates. Activations: `distmk.tasks.wide`. Of the
    residual stream and of the parts a rank has the rows that it owns.

    decode: those of the narrow program, with the batch of a wide iteration: u8 [sizeof(WideBatch)]. In use are, beside the batch,
        what outlives an iteration (page table, batcher, KV caches, parameters of sampling) and what follows the head.
    x: f32 [owned rows, hidden_size], the residual stream.
    normalized: activations of hidden_size columns, x / rms(x) of all rows.
    parts: f32 [owned rows, ranks * slots_per_rank * hidden_size], the terms of a sum into the residual stream.
    qkv: bf16 [WIDE_ROWS, q, k and v columns of a rank]. q: bf16 [WIDE_ROWS, query columns of a rank].
    attention_out, mlp_hidden: activations of the query and MLP columns of a rank.
    sampled_x: activations of hidden_size columns, of which as many rows are in use as are sampled.
    o_splits, down_splits: parts of the columns of a rank's o and down projections, which different instances multiply, each with
        a slot of its own.
    """

    decode: DecodeBuffers
    x: Buffer
    normalized: Buffer
    parts: Buffer
    qkv: Buffer
    q: Buffer
    attention_out: Buffer
    mlp_hidden: Buffer
    sampled_x: Buffer
    o_splits: int
    down_splits: int

    @property
    def batch(self) -> Buffer:
        return self.decode.batch

    @property
    def slots_per_rank(self) -> int:
        return max(self.o_splits, self.down_splits)

    def slot_of(self, rank: int) -> int:
        """A rank's first slot in the parts of all ranks."""
        return rank * self.slots_per_rank

    def slots_at(self, rank: int, hidden_size: int, num_splits: int) -> Region:
        """The first `num_splits` slots of a rank, in its own memory; its peers have them at the same place."""
        first = self.slot_of(rank)
        return self.parts.at(rank, first * hidden_size, (first + num_splits) * hidden_size)


def declare_wide_buffers(graph: Graph, plan: WorkPlan, decode: DecodeBuffers, program: int) -> WideBuffers:
    """Add the buffers of wide program `program` to `graph`; `decode`: those of the narrow one. Sets the batch of `graph`."""
    hidden, tiled = plan.config.hidden_size, plan.options.tiled
    q_cols = [shape.num_q * shape.head_dim for shape in plan.shapes]
    mlp_cols = [end - begin for begin, end in (shard.mlp for shard in plan.shards)]
    o_splits, down_splits = (splits_of(min(cols), tiled) for cols in (q_cols, mlp_cols))
    slots = graph.num_ranks * max(o_splits, down_splits)
    from_peers = (
        Space.HEAP if graph.num_ranks > 1 else Space.LOCAL
    )  # peers write the rows that they own, and terms of sums

    def activations(name: str, num_cols: int, space: Space = Space.LOCAL) -> Buffer:
        return graph.buffer(name, activation_cols(num_cols, tiled), dtype="bf16", space=space)

    def rows(name: str, num_cols: int) -> Buffer:
        return graph.buffer(name, num_cols, rows=WIDE_ROWS, dtype="bf16", space=Space.LOCAL)

    owned = owned_rows(graph.num_ranks)
    decode = _share(graph, plan, decode, program)
    graph.batch = decode.batch
    return WideBuffers(
        decode=decode,
        x=graph.buffer("wide_x", hidden, rows=owned, space=Space.LOCAL),
        normalized=activations("wide_normalized", hidden, from_peers),
        parts=graph.buffer("wide_parts", slots * hidden, rows=owned, space=from_peers),
        qkv=rows("wide_qkv", max(shape.qkv_cols for shape in plan.shapes)),
        q=rows("wide_q", max(q_cols)),
        attention_out=activations("wide_attention_out", max(q_cols)),
        mlp_hidden=activations("wide_mlp_hidden", max(mlp_cols)),
        sampled_x=_sampled_x(graph, hidden, tiled),
        o_splits=o_splits,
        down_splits=down_splits,
    )


def splits_of(num_cols: int, tiled: bool) -> int:
    """Splits of a product over `num_cols` columns: on GPUs, where its rows alone are too few tiles for all SMs."""
    return min(MAX_WIDE_SPLITS, padded_cols(num_cols) // WIDE_COLS) if tiled else 1


def _sampled_x(graph: Graph, num_cols: int, tiled: bool) -> Buffer:
    """Tiled, the rows in use are the first of every block, which is a row of the buffer."""
    size, num_blocks = activation_cols(num_cols, tiled), padded_cols(num_cols) // WIDE_COLS if tiled else 1
    return graph.buffer("wide_sampled_x", size // num_blocks, rows=num_blocks, dtype="bf16", space=Space.LOCAL)


def share_buffers(graph: Graph, plan: WorkPlan, first: Graph, wide: WideBuffers, program: int) -> WideBuffers:
    """The buffers of wide program `program`. All but `sampled` are those of the first one, `wide`, whose graph is `first`."""
    for buffer in first.buffers:
        if buffer is not wide.decode.sampled:
            graph.share(buffer)
    graph.batch = wide.decode.batches[program]
    sampled = _sampled(graph, plan, wide.decode.sampling, program)
    return dataclasses.replace(wide, decode=dataclasses.replace(wide.decode, batch=graph.batch, sampled=sampled))


def _share(graph: Graph, plan: WorkPlan, decode: DecodeBuffers, program: int) -> DecodeBuffers:
    """The narrow program's buffers with another batch; those of use to a wide one become buffers of `graph`. What it has for each
    sampled row is larger if it samples more.
    """
    caches = [cache for pair in decode.caches for cache in pair]
    for buffer in (decode.page_table, decode.state, *caches, *decode.batches):
        graph.share(buffer)
    sampling = share_sampling(graph, plan, decode.sampling)
    row_bytes = candidates_bytes(sampling.num_rows)
    if sampling.num_rows > decode.sampling.num_rows:
        candidates = graph.buffer(f"{WIDE}candidates", graph.num_workers * row_bytes, dtype="u8", space=Space.LOCAL)
    else:
        candidates = graph.share(decode.candidates)
    sampled = _sampled(graph, plan, sampling, program)
    batch = decode.batches[program]
    return dataclasses.replace(decode, batch=batch, sampling=sampling, candidates=candidates, sampled=sampled)


def _sampled(graph: Graph, plan: WorkPlan, sampling: SamplingBuffers, program: int) -> Buffer:
    """Not shared: on other ranks than 0 it is not known when a copy of it is no longer sent."""
    num_bytes = graph.num_ranks * candidates_bytes(sampling.num_rows)
    return graph.buffer(f"sampled{plan.options.row_buckets[program]}", num_bytes, dtype="u8")


class SharedWeights:
    """The weights of the narrow graph by name and rank, each added to the wide graph as it is asked for."""

    def __init__(self, graph: Graph, narrow: Graph) -> None:
        self._graph = graph
        self._weights = {(weight.name, weight.rank): weight for weight in narrow.weights}
        if len(self._weights) < len(narrow.weights):
            raise UsageError("two weights of a rank have the same name; a wide program finds weights by name")

    def whole(self, name: str, rank: int) -> Slab:
        """All rows of a weight."""
        weight: Weight = self._graph.share_weight(self._weights[(name, rank)])
        return Slab(weight, 0, weight.rows)
