"""The buffers that every bucket's program has: data that outlives an iteration, the batch, and the outputs of the head."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from distmk.abi import Batch, JobBatch, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Slab, WeightKind
from distmk.lower.options import Bucket
from distmk.lower.plan import WorkPlan
from distmk.lower.sampling import SamplingBuffers, declare_sampling
from distmk.tasks.drafting import drafts_bytes
from distmk.tasks.scheduling import batcher_bytes, candidates_bytes


@dataclass(frozen=True)
class ProgramBuffers:
    """The buffers of a program, whether its tasks are slabs or jobs.

    Buffers of the same name are shared by the programs of a launch.

    batches: u8, the batch of each program, put to every rank by rank 0's scheduler: sizeof(Batch), or sizeof(JobBatch)
      if tasks are jobs.
    page_table: i32 [slots, max_pages].
    state: rank 0's batcher (`BatcherState`).
    caches: bf16 K and V cache of each layer (`AttentionShape.cache_cols`).
    ropes: by name of the rotary table, each rank's f32 [max_model_len, head_dim], cosines and sines by position.
    sampling: the logits, and what sampling computes from them (`lower/sampling.py`).
    drafts: on rank 0, see `drafts_bytes`; None without a drafter.
    candidates: Candidate [worker, sampled rows], the best logits of parts of a rank's vocabulary.
    sampled: Candidate [rank, sampled rows]; only rank 0 reads its copy. Each program has its own, because the other
      ranks do not know when the copy that they send has been sent.
    """

    bucket: Bucket
    batches: tuple[Buffer, ...]
    page_table: Buffer
    state: Buffer
    caches: tuple[tuple[Buffer, Buffer], ...]
    ropes: Mapping[str, tuple[Slab, ...]]
    sampling: SamplingBuffers
    candidates: Buffer
    sampled: Buffer
    drafts: Buffer | None

    @property
    def batch(self) -> Buffer:
        """The batch of this program."""
        return self.batches[self.bucket.program]


def declare_buffers(graph: Graph, plan: WorkPlan, bucket: Bucket) -> ProgramBuffers:
    """Add the buffers of a program to `graph`, and set its batch."""
    options, row_bytes = plan.options, candidates_bytes(bucket.num_sampled)
    buffers = ProgramBuffers(
        bucket=bucket,
        batches=tuple(_batch(graph, each) for each in options.buckets),
        page_table=graph.buffer("page_table", options.num_slots * plan.shapes[0].max_pages, dtype="i32"),
        state=_local(graph, "batcher", batcher_bytes(plan.num_pages, options.max_seqs)),
        caches=tuple(_cache(graph, plan, layer) for layer in range(plan.config.num_layers)),
        ropes={table: tuple(_rope(graph, plan, rank, table) for rank in plan.ranks) for table in plan.rope_tables},
        sampling=declare_sampling(graph, plan, bucket.num_sampled),
        candidates=_local(graph, f"candidates{bucket.num_sampled}", graph.num_workers * row_bytes),
        sampled=graph.buffer(f"sampled{bucket.max_rows}", graph.num_ranks * row_bytes, dtype="u8"),
        drafts=_local(graph, "drafts", drafts_bytes(options.num_slots)) if options.drafter else None,
    )
    graph.batch = buffers.batch
    return buffers


def batch_name(bucket: Bucket) -> str:
    """The name of a program's batch."""
    return f"batch{bucket.max_rows}"


def _batch(graph: Graph, bucket: Bucket) -> Buffer:
    kind = JobBatch if bucket.has_jobs else Batch
    return graph.buffer(batch_name(bucket), ctypes.sizeof(kind), dtype="u8")


def _local(graph: Graph, name: str, num_bytes: int) -> Buffer:
    return graph.buffer(name, num_bytes, dtype="u8", space=Space.LOCAL)


def _cache(graph: Graph, plan: WorkPlan, layer: int) -> tuple[Buffer, Buffer]:
    cols = max(shape.cache_cols for shape in plan.shapes)
    return (
        graph.buffer(f"k_cache{layer}", cols, dtype="bf16", space=Space.LOCAL),
        graph.buffer(f"v_cache{layer}", cols, dtype="bf16", space=Space.LOCAL),
    )


def _rope(graph: Graph, plan: WorkPlan, rank: int, table: str) -> Slab:
    positions = plan.options.max_model_len
    return Slab(graph.weight(table, rank, plan.config.head_dim, [], WeightKind.ROPE, rows=positions), 0, positions)
