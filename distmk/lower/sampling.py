"""Sampling of rows that need their logits over the whole vocabulary: rank 0 collects them, and a task for each row draws.

In an iteration without such rows these tasks signal before their waits are met (`Task.may_idle`), so a greedy batch does not wait
for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import MAX_ROWS, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.lower.partition import partition_items
from distmk.lower.plan import WorkPlan
from distmk.tasks import CountTokens, SampleRow, SendLogits
from distmk.tasks.sampling import (
    DRAWN_BYTES,
    RECORD_BYTES,
    SLOTS_BYTES,
    VECTOR,
    mask_words,
    section_stride,
)

MAX_SENDERS = 8  # tasks of a rank that send its logits; of a rank of another host one, as each is a message
FIRST_WORKER = 1  # worker 0 runs `sample`


@dataclass(frozen=True)
class SamplingBuffers:
    """Memory of sampling; of all but `logits`, rank 0's is used.

    logits: f32 [MAX_ROWS, ranks' shards of the vocabulary, `section_stride` apart], each rank's of the rows that need them or
        that are kept; rank 0 has all ranks' of the former.
    slots: SlotSampling [MAX_ROWS slots]. counts: u32 [MAX_ROWS slots, vocab]. mask: u32 [MAX_ROWS slots, `mask_words`].
    adjusted: f32, a row of logits for each row of the batch.
    drawn, records: Candidate [MAX_ROWS] and LogprobRecord [MAX_ROWS], by row of the batch.
    """

    logits: Buffer
    slots: Buffer
    counts: Buffer
    mask: Buffer
    adjusted: Buffer
    drawn: Buffer
    records: Buffer

    def logits_of(self, rank: int, num_ranks: int, begin: int, end: int) -> Region:
        """Where a rank stores columns [begin, end) of its shard."""
        first = rank * (self.logits.cols // num_ranks)
        return self.logits.at(rank, first + begin, first + end)


def declare_sampling(graph: Graph, plan: WorkPlan) -> SamplingBuffers:
    """Add the buffers to `graph`."""
    vocab = plan.config.vocab_size
    cols = graph.num_ranks * section_stride(vocab, graph.num_ranks)

    def declare(name: str, num: int, dtype: str) -> Buffer:
        return graph.buffer(name, num, dtype=dtype, space=Space.LOCAL)

    return SamplingBuffers(
        logits=graph.buffer("logits", cols, rows=MAX_ROWS),
        slots=declare("slot_sampling", SLOTS_BYTES, "u8"),
        counts=declare("token_counts", MAX_ROWS * vocab, "i32"),
        mask=declare("allowed_tokens", MAX_ROWS * mask_words(vocab), "i32"),
        adjusted=declare("adjusted_logits", MAX_ROWS * cols, "f32"),
        drawn=declare("drawn", MAX_ROWS * DRAWN_BYTES, "u8"),
        records=declare("logprobs", MAX_ROWS * RECORD_BYTES, "u8"),
    )


def emit_sampling(graph: Graph, plan: WorkPlan, buffers: SamplingBuffers, batch: Buffer) -> None:
    """Send the logits to rank 0; there, count tokens and sample every row. Behind the head, before `sample`."""
    for rank in plan.ranks[1:]:
        _emit_senders(graph, plan, buffers, batch, rank)
    slots, counts = buffers.slots.at(0), buffers.counts.at(0)
    worker = _worker(plan, MAX_ROWS)
    graph.add(CountTokens(0, "count_tokens", worker, batch=batch.at(0), slots=slots, counts=counts))
    cols = buffers.logits.cols
    for row in range(MAX_ROWS):
        graph.add(
            SampleRow(
                rank=0,
                op="sample_row",
                worker=_worker(plan, row),
                logits=buffers.logits.at(0),
                mask=buffers.mask.at(0),
                adjusted=buffers.adjusted.at(0, row * cols, (row + 1) * cols),
                drawn=buffers.drawn.at(0, row * DRAWN_BYTES, (row + 1) * DRAWN_BYTES),
                record=buffers.records.at(0, row * RECORD_BYTES, (row + 1) * RECORD_BYTES),
                batch=batch.at(0),
                row=row,
                num_ranks=graph.num_ranks,
                slots=slots,
                counts=counts,
            )
        )


def _worker(plan: WorkPlan, index: int) -> int:
    return (FIRST_WORKER + index) % plan.options.num_workers


def _emit_senders(graph: Graph, plan: WorkPlan, buffers: SamplingBuffers, batch: Buffer, rank: int) -> None:
    begin, end = plan.shards[rank].vocab
    is_near = rank in plan.options.hosts[0]
    num_senders = min(MAX_SENDERS if is_near else 1, plan.options.num_workers)
    num_vectors = -(-(end - begin) // VECTOR)
    for index, (first, last) in enumerate(partition_items(num_vectors, 4 * VECTOR, num_senders)):
        logits = buffers.logits_of(rank, graph.num_ranks, first * VECTOR, min(last * VECTOR, end - begin))
        graph.add(SendLogits(rank, "send_logits", _worker(plan, index), logits=logits, batch=batch.at(rank)))
