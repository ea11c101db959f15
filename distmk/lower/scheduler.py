"""The scheduler step at the start of an iteration: it takes the last iteration's tokens and makes this one's batch."""

from __future__ import annotations

from distmk.abi import ROW_COST_UNIT, LaunchKind
from distmk.graph.graph import Graph
from distmk.lower.buffers import ProgramBuffers
from distmk.lower.plan import WorkPlan
from distmk.tasks import SchedulerStep


def emit_scheduler_step(graph: Graph, plan: WorkPlan, buffers: ProgramBuffers) -> None:
    """One task, run by a scheduler of rank 0."""
    options, drafter = plan.options, plan.options.drafter
    graph.add(
        SchedulerStep(
            rank=0,
            op="scheduler_step",
            launch=LaunchKind.SCHEDULER,
            candidates=buffers.sampled.at(0),
            batches=tuple(batch.at(0) for batch in buffers.batches),
            page_table=buffers.page_table.at(0),
            state=buffers.state.at(0),
            drawn=buffers.sampling.drawn.at(0),
            slots=buffers.sampling.slots.at(0),
            logprobs=buffers.sampling.records.at(0),
            drafts=buffers.drafts.at(0) if buffers.drafts else None,
            num_ranks=options.num_ranks,
            page_size=options.page_size,
            num_pages=plan.num_pages,
            max_slots=options.max_seqs,
            max_positions=options.max_model_len,
            program=buffers.bucket.program,
            max_rows=options.row_buckets,
            max_drafts=drafter.num_speculative_tokens if drafter else 0,
            row_cost=round(ROW_COST_UNIT * options.draft_row_cost) if drafter else 0,
        )
    )
