"""The head, vocabulary-parallel, and sampling.

Rank 0 gets each rank's best candidate for every sampled row, and the logits of rows that need more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from distmk.abi import Epilogue
from distmk.drafters import Drafter, DraftPlace
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer
from distmk.lower.buffers import ProgramBuffers
from distmk.lower.plan import WorkPlan
from distmk.lower.product import Product, slab_task
from distmk.lower.products import head_product
from distmk.lower.sampling import emit_sampling
from distmk.lower.slab_buffers import SlabBuffers, mlp_write
from distmk.model.operators import Head
from distmk.tasks import AcceptDrafts, Sample
from distmk.tasks.scheduling import candidates_bytes


def emit_head(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: Head) -> None:
    """argmax(scale * table @ norm(x)); each rank computes its shard of the vocabulary."""
    product = head_product(graph, plan, op)
    for rank in plan.ranks:
        _emit_argmax(graph, plan, buffers, op, product, rank)
    emit_sampled(graph, plan, buffers, [partition.num_tasks for partition in plan.head])


def emit_sampled(graph: Graph, plan: WorkPlan, buffers: ProgramBuffers, num_parts: Sequence[int]) -> None:
    """The tasks that sample the tokens of `buffers.batch`, from the logits and from the best candidates of each rank.

    num_parts: by rank, the parts of its vocabulary that have candidates.
    """
    emit_sampling(graph, plan, buffers.sampling, buffers.batch, is_job_batch=buffers.bucket.has_jobs)
    num_bytes = candidates_bytes(buffers.bucket.num_sampled)
    for rank in plan.ranks:
        graph.add(
            Sample(
                rank=rank,
                op="sample",
                worker=0,
                candidates=buffers.candidates.at(rank, 0, num_parts[rank] * num_bytes),
                out=buffers.sampled.at(0, rank * num_bytes, (rank + 1) * num_bytes),
                batch=buffers.batch.at(rank),
                num_rows=buffers.bucket.num_sampled,
            )
        )
    if plan.options.drafter and buffers.drafts:
        _emit_drafts(graph, plan, buffers, buffers.drafts, plan.options.drafter)


def _emit_drafts(graph: Graph, plan: WorkPlan, buffers: ProgramBuffers, drafts: Buffer, drafter: Drafter) -> None:
    """The tasks that find which drafts are accepted, and that propose the next ones."""
    batch, num_rows, num_slots = buffers.batch.at(0), buffers.bucket.num_sampled, plan.options.num_slots
    graph.add(
        AcceptDrafts(
            rank=0,
            op="accept_drafts",
            worker=0,
            candidates=buffers.sampled.at(0),
            drawn=buffers.sampling.drawn.at(0),
            drafts=drafts.at(0),
            batch=batch,
            num_ranks=graph.num_ranks,
            num_rows=num_rows,
            num_slots=num_slots,
            is_job_batch=buffers.bucket.has_jobs,
        )
    )
    place = DraftPlace(
        drafts=drafts.at(0),
        batch=batch,
        num_rows=num_rows,
        num_slots=num_slots,
        max_ids=plan.options.max_model_len + 1,
        is_job_batch=buffers.bucket.has_jobs,
    )
    drafter.emit(graph, place)


def _emit_argmax(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: Head, product: Product, rank: int) -> None:
    first = plan.shards[rank].vocab[0]
    write = mlp_write(plan.config.num_layers - 1)
    for worker, (begin, end) in product.partitions[rank].by_worker():
        graph.add(
            slab_task(
                plan,
                product,
                rank,
                (begin, end),
                worker=worker,
                x=buffers.x_bf16.at(write).at(rank),
                x_squares=buffers.x_squares(plan, write, rank),
                out=buffers.candidates.at(rank, worker * candidates_bytes(), (worker + 1) * candidates_bytes()),
                batch=buffers.batch.at(rank),
                epilogue=Epilogue.ARGMAX,
                eps=plan.config.rms_norm_eps,
                first_token=first + begin,
                logits=buffers.sampling.logits_of(rank, graph.num_ranks, begin, end),
                keeps_logits=plan.options.keep_logits,
                softcap=op.softcap or 0.0,
            )
        )
