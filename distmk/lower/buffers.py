"""The buffers of a decode program: memory between tasks, between iterations and between ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from distmk.abi import MAX_ROWS, Batch, Space, WideBatch
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region, Slab, WeightKind
from distmk.lower.partials import AttentionPartials, declare_partials
from distmk.lower.plan import WorkPlan
from distmk.lower.rotating import RotatingBuffers, Rotation
from distmk.lower.sampling import SamplingBuffers, declare_sampling
from distmk.model.shards import Range
from distmk.tasks.scheduling import batcher_bytes, candidates_bytes

EMBED_WRITE = 0  # index of the embedding among an iteration's writes of the residual stream


def attention_write(layer: int) -> int:
    """Index of a layer's o projection among an iteration's writes of the residual stream."""
    return EMBED_WRITE + 1 + 2 * layer


def mlp_write(layer: int) -> int:
    """Index of a layer's down projection; of layer -1, that of the embedding, whose result layer 0 reads."""
    return EMBED_WRITE + 2 + 2 * layer


class Bf16Output(TypedDict, total=False):
    """Operands of a task that writes columns of the residual stream: their bf16 copy, and the columns that it resets."""

    out_bf16: Region
    reset: Region | None


@dataclass(frozen=True)
class HostSlots:
    """Memory of an all-reduce across hosts, f32 [MAX_ROWS, hidden_size] each (`lower/hierarchical.py`).

    ranks: partial sums, by rank within the host. hosts: the sums of the hosts. total: their sum.
    """

    ranks: tuple[Buffer, ...]
    hosts: tuple[Buffer, ...]
    total: Buffer


@dataclass(frozen=True)
class DecodeBuffers:
    """The buffers of a decode program, of the size that the rank with the largest shard needs.

    Activations are [MAX_ROWS, columns]; a row is a token of the iteration.

    batch: u8 [sizeof(Batch)], the iteration's rows, put to every rank by rank 0's scheduler. batches: those of all programs, by
        number.
    page_table: i32 [slots, max_pages].
    state: rank 0's batcher (`BatcherState`).
    x: f32 [MAX_ROWS, hidden_size], the residual stream.
    x_bf16: the same in bf16, by write of the residual stream.
    y: f32 [MAX_ROWS, hidden_size], what a post-norm normalizes; None: the model has none.
    qkv: f32 [MAX_ROWS, q, k and v columns of a rank], by layer.
    partials: attention's partial results, by layer.
    attention_out: bf16 [MAX_ROWS, query columns of a rank], by layer.
    mlp_hidden: bf16 [MAX_ROWS, MLP columns of a rank], by layer.
    host_slots: where all-reduces cross hosts, what they use instead of the three slots below.
    attention_slots: f32 [rank, hidden_size * MAX_ROWS], blocks that ranks push for the all-reduce behind o.
    mlp_slots: two of the same, for the embedding and down. Two, as a worker without rows of o may push to one early.
    candidates: Candidate [worker, sampled rows] of a rank's head tasks.
    sampled: Candidate [rank, sampled rows], of which rank 0's is used.
    sampling: the logits, and what is drawn from them (`lower/sampling.py`).
    caches: bf16 K and V cache of each layer (`AttentionShape.cache_cols`).
    ropes: by name of the rotary table, each rank's f32 [max_model_len, head_dim], cosines and sines by position.
    """

    batch: Buffer
    batches: tuple[Buffer, ...]
    page_table: Buffer
    state: Buffer
    x: Buffer
    x_bf16: RotatingBuffers
    y: Buffer | None
    qkv: RotatingBuffers
    partials: tuple[AttentionPartials, ...]
    attention_out: RotatingBuffers
    mlp_hidden: RotatingBuffers
    host_slots: tuple[HostSlots, ...]
    attention_slots: Buffer
    mlp_slots: tuple[Buffer, Buffer]
    candidates: Buffer
    sampled: Buffer
    sampling: SamplingBuffers
    caches: tuple[tuple[Buffer, Buffer], ...]
    ropes: Mapping[str, tuple[Slab, ...]]

    def slots_at(self, write: int) -> Buffer:
        """The slots of the all-reduce behind write `write` of the residual stream."""
        return (self.attention_slots, *self.mlp_slots)[_slots_index(write)]

    def host_slots_at(self, write: int) -> HostSlots:
        """The same of an all-reduce across hosts."""
        return self.host_slots[_slots_index(write)]

    def bf16_output(self, write: int, rank: int, cols: Range) -> Bf16Output:
        """The bf16 copy of columns `cols` that write `write` of the residual stream makes, and the columns that it resets."""
        return {
            "out_bf16": self.x_bf16.at(write).at(rank, *cols),
            "reset": self.x_bf16.reset_at(write, rank, *cols),
        }


def _slots_index(write: int) -> int:
    """Which of the slots behind o and the two behind down or the embedding."""
    if write % 2 == attention_write(0) % 2:
        return 0
    layer = write // 2 - 1  # -1: the embedding
    return 1 + layer % 2


def declare_buffers(graph: Graph, plan: WorkPlan) -> DecodeBuffers:
    """Add the buffers of a decode program to `graph`."""
    config, shapes = plan.config, plan.shapes
    mlp_cols = max(shard.mlp[1] - shard.mlp[0] for shard in plan.shards)
    one_shot = plan.options.all_reduces and not plan.options.crosses_hosts
    slots_cols = graph.num_ranks * MAX_ROWS * config.hidden_size if one_shot else 1
    per_layer = plan.attention_rotation
    buckets = plan.options.row_buckets
    batches = tuple(_batch(graph, rows) for rows in buckets)
    buffers = DecodeBuffers(
        batch=batches[0] if buckets[0] == MAX_ROWS else _batch(graph, MAX_ROWS),
        batches=batches,
        page_table=graph.buffer("page_table", plan.options.num_slots * shapes[0].max_pages, dtype="i32"),
        state=_local(graph, "batcher", batcher_bytes(plan.num_pages, plan.options.max_seqs)),
        x=graph.buffer("x", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL),
        x_bf16=_rows(graph, "x_bf16", config.hidden_size, plan.residual_rotation),
        y=graph.buffer("y", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL) if plan.has_post_norms else None,
        qkv=_rows(graph, "qkv", max(shape.qkv_cols for shape in shapes), per_layer, "f32"),
        partials=declare_partials(graph, plan),
        attention_out=_rows(graph, "attention_out", max(s.num_q * s.head_dim for s in shapes), per_layer),
        mlp_hidden=_rows(graph, "mlp_hidden", mlp_cols, plan.mlp_rotation),
        host_slots=tuple(_host_slots(graph, plan, i) for i in range(3 if plan.options.crosses_hosts else 0)),
        attention_slots=graph.buffer("attention_slots", slots_cols, lamport=True),
        mlp_slots=(
            graph.buffer("mlp_slots", slots_cols, lamport=True),
            graph.buffer("mlp_slots1", slots_cols, lamport=True),
        ),
        candidates=_local(graph, "candidates", graph.num_workers * candidates_bytes()),
        sampled=graph.buffer("sampled", graph.num_ranks * candidates_bytes(), dtype="u8"),
        sampling=declare_sampling(graph, plan),
        caches=tuple(_cache(graph, plan, layer) for layer in range(config.num_layers)),
        ropes={table: tuple(_rope(graph, plan, rank, table) for rank in plan.ranks) for table in plan.rope_tables},
    )
    graph.batch = buffers.batch
    return buffers


def batch_name(max_rows: int) -> str:
    """The name of the batch of the program whose iterations carry up to `max_rows` rows."""
    return f"batch{max_rows}"


def _batch(graph: Graph, max_rows: int) -> Buffer:
    """Add the batch metadata of a program."""
    kind = WideBatch if max_rows > MAX_ROWS else Batch
    return graph.buffer(batch_name(max_rows), ctypes.sizeof(kind), dtype="u8")


def _local(graph: Graph, name: str, num_bytes: int) -> Buffer:
    return graph.buffer(name, num_bytes, dtype="u8", space=Space.LOCAL)


def _host_slots(graph: Graph, plan: WorkPlan, index: int) -> HostSlots:
    hosts, cols = plan.options.hosts, plan.config.hidden_size

    def declare(name: str) -> Buffer:
        return graph.buffer(f"{name}_{index}", cols, rows=MAX_ROWS)

    return HostSlots(
        ranks=tuple(declare(f"sum_of_local_rank{local}") for local in range(max(map(len, hosts)))),
        hosts=tuple(declare(f"sum_of_host{host}") for host in range(len(hosts))),
        total=declare("sum_of_hosts"),
    )


def _rows(graph: Graph, name: str, cols: int, rotation: Rotation, dtype: str = "bf16") -> RotatingBuffers:
    return RotatingBuffers.declare(graph, name, cols, rotation, rows=MAX_ROWS, dtype=dtype)


def _cache(graph: Graph, plan: WorkPlan, layer: int) -> tuple[Buffer, Buffer]:
    cols = max(shape.cache_cols for shape in plan.shapes)
    return (
        graph.buffer(f"k_cache{layer}", cols, dtype="bf16", space=Space.LOCAL),
        graph.buffer(f"v_cache{layer}", cols, dtype="bf16", space=Space.LOCAL),
    )


def _rope(graph: Graph, plan: WorkPlan, rank: int, table: str) -> Slab:
    positions = plan.options.max_model_len
    return Slab(graph.weight(table, rank, plan.config.head_dim, [], WeightKind.ROPE, rows=positions), 0, positions)
