"""Sampling of rows that need logits over the whole vocabulary: rank 0 collects these, and one task per row draws a token.

In an iteration without such rows these tasks signal before their waits are met (`Task.may_idle`), so a greedy batch
does not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import Space
from distmk.graph.graph import Graph
from distmk.graph.partition import partition_items
from distmk.graph.regions import Buffer, Region
from distmk.lower.plan import WorkPlan
from distmk.tasks import CountTokens, SampleRow, SendLogits, VerifyRow
from distmk.tasks.sampling import (
    DRAWN_BYTES,
    RECORD_BYTES,
    SLOT_BYTES,
    VECTOR,
    mask_vector_words,
    section_stride,
)

MAX_SENDERS = 8  # tasks of a rank that send its logits; one for a rank on another host, as each sends a message
FIRST_WORKER = 1  # worker 0 runs `sample`


@dataclass(frozen=True)
class SamplingBuffers:
    """Memory of sampling. All ranks use `logits`; only rank 0 uses the rest. rows: the most that an iteration samples.

    logits: f32 [rows, ranks' shards of the vocabulary, `section_stride` apart]. Each rank stores its shard for the rows
      that need logits or keep them. Rank 0 gets the shards of all ranks for the rows that need them.
    slots: SlotSampling [slots].
    counts: u32 [slots, vocab].
    masks: u32 [rows, `mask_vector_words`], copies of the host's masks.
    adjusted: f32, a row of logits for each row.
    drawn, records: Candidate [rows] and LogprobRecord [rows].
    """

    logits: Buffer
    slots: Buffer
    counts: Buffer
    masks: Buffer
    adjusted: Buffer
    drawn: Buffer
    records: Buffer

    @property
    def num_rows(self) -> int:
        return self.logits.rows

    def logits_of(self, rank: int, num_ranks: int, begin: int, end: int) -> Region:
        """The region in which a rank stores columns [begin, end) of its shard."""
        first = rank * (self.logits.cols // num_ranks)
        return self.logits.at(rank, first + begin, first + end)


def logits_name(num_rows: int) -> str:
    """The name of the logits of a program that samples up to `num_rows` rows."""
    return f"logits{num_rows}"


def declare_sampling(graph: Graph, plan: WorkPlan, num_rows: int) -> SamplingBuffers:
    """Add the buffers of a program that samples up to `num_rows` rows to `graph`, with all slots."""
    vocab, num_slots = plan.config.vocab_size, plan.options.num_slots
    cols = graph.num_ranks * section_stride(vocab, graph.num_ranks)
    return SamplingBuffers(
        slots=_local(graph, "slot_sampling", num_slots * SLOT_BYTES, "u8"),
        counts=_local(graph, "token_counts", num_slots * vocab, "i32"),
        masks=_local(graph, f"token_masks{num_rows}", num_rows * mask_vector_words(vocab), "i32"),
        logits=graph.buffer(logits_name(num_rows), cols, rows=num_rows),
        adjusted=_local(graph, f"adjusted_logits{num_rows}", num_rows * cols, "f32"),
        drawn=_local(graph, f"drawn{num_rows}", num_rows * DRAWN_BYTES, "u8"),
        records=_local(graph, f"logprobs{num_rows}", num_rows * RECORD_BYTES, "u8"),
    )


def _local(graph: Graph, name: str, num: int, dtype: str) -> Buffer:
    return graph.buffer(name, num, dtype=dtype, space=Space.LOCAL)


def emit_sampling(graph: Graph, plan: WorkPlan, buffers: SamplingBuffers, batch: Buffer, *, is_job_batch: bool) -> None:
    """Send the logits to rank 0; there, count tokens and sample every row.

    These tasks run after the head and before `sample`.

    is_job_batch: the batch is a `JobBatch`.
    """
    for rank in plan.ranks[1:]:
        _emit_senders(graph, plan, buffers, batch.at(rank), is_job_batch)
    num_rows, num_slots = buffers.num_rows, plan.options.num_slots
    slots, counts = buffers.slots.at(0), buffers.counts.at(0)
    graph.add(
        CountTokens(
            rank=0,
            op="count_tokens",
            worker=_worker(plan, num_rows),
            batch=batch.at(0),
            slots=slots,
            counts=counts,
            num_slots=num_slots,
            is_job_batch=is_job_batch,
        )
    )
    cols, num_words = buffers.logits.cols, buffers.masks.cols // num_rows
    task = VerifyRow if plan.options.drafter else SampleRow
    for row in range(num_rows):
        graph.add(
            task(
                rank=0,
                op=task.type_name,
                worker=_worker(plan, row),
                logits=buffers.logits.at(0),
                mask=buffers.masks.at(0, row * num_words, (row + 1) * num_words),
                adjusted=buffers.adjusted.at(0, row * cols, (row + 1) * cols),
                drawn=buffers.drawn.at(0, row * DRAWN_BYTES, (row + 1) * DRAWN_BYTES),
                record=buffers.records.at(0, row * RECORD_BYTES, (row + 1) * RECORD_BYTES),
                batch=batch.at(0),
                row=row,
                num_ranks=graph.num_ranks,
                slots=slots,
                counts=counts,
                num_slots=num_slots,
                is_job_batch=is_job_batch,
            )
        )


def _worker(plan: WorkPlan, index: int) -> int:
    return (FIRST_WORKER + index) % plan.options.num_workers


def _emit_senders(graph: Graph, plan: WorkPlan, buffers: SamplingBuffers, batch: Region, is_job_batch: bool) -> None:
    """The tasks that send the logits of the rank of `batch`."""
    rank = batch.rank
    begin, end = plan.shards[rank].vocab
    is_near = rank in plan.options.hosts[0]
    num_senders = min(MAX_SENDERS if is_near else 1, plan.options.num_workers)
    num_vectors = -(-(end - begin) // VECTOR)
    for index, (first, last) in enumerate(partition_items(num_vectors, 4 * VECTOR, num_senders).ranges):
        logits = buffers.logits_of(rank, graph.num_ranks, first * VECTOR, min(last * VECTOR, end - begin))
        graph.add(
            SendLogits(rank, "send_logits", _worker(plan, index), logits=logits, batch=batch, is_job_batch=is_job_batch)
        )
