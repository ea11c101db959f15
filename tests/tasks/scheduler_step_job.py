"""What every rank of test_scheduler_step.py runs: launches of a graph in which each rank copies the row table that it got.

    python tests/tasks/scheduler_step_job.py BACKEND PROMPTS KIND
        PROMPTS: a list of launches, each a list of prompts and a number of new tokens for each; KIND: slabs or jobs

Rank 0 prints a JSON object a launch: tokens (request, token id, iteration) and, of each rank, the last batch that had rows
(num_reset_rows, rows, runs; tokens of a job iteration, and the numbers of its sampled rows), the pages of every slot, and the
batch that ended the launch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, NamedTuple

import numpy as np
from support import jobs

import distmk
from distmk.abi import MAX_ROWS, Batch, JobBatch, LaunchKind
from distmk.backends.launch_spec import LaunchSpec
from distmk.tasks import Put, SchedulerStep
from distmk.tasks.scheduling import batcher_bytes, candidates_bytes
from distmk.tasks.slots import slots_for

PAGE_SIZE, MAX_PAGES = 8, 4
TOKEN = 77  # every row's candidate
UNSET = -7  # entry of a page table before a launch


class Kind(NamedTuple):
    """Of a scheduler step: the most sequences, rows of an iteration, and pages."""

    max_slots: int
    max_rows: int
    num_pages: int
    batch: type[Batch] | type[JobBatch]

    @property
    def num_slots(self) -> int:
        return slots_for(self.max_slots)


KINDS = {"slabs": Kind(4, MAX_ROWS, 9, Batch), "jobs": Kind(40, 100, 99, JobBatch)}


def step_graph(num_ranks: int, kind: Kind) -> distmk.Graph:
    graph = distmk.Graph(num_ranks, 1)
    candidates = graph.buffer("candidates", candidates_bytes(kind.num_slots) * num_ranks, dtype="u8")
    batch = graph.batch = graph.buffer("batch", ctypes.sizeof(kind.batch), dtype="u8")
    pages = graph.buffer("pages", kind.num_slots * MAX_PAGES, dtype="i32")
    step = SchedulerStep(
        0,
        "scheduler_step",
        launch=LaunchKind.SCHEDULER,
        candidates=candidates.at(0),
        batches=(batch.at(0),),
        page_table=pages.at(0),
        state=graph.buffer("state", batcher_bytes(kind.num_pages, kind.max_slots), dtype="u8").at(0),
        num_ranks=num_ranks,
        page_size=PAGE_SIZE,
        num_pages=kind.num_pages,
        max_slots=kind.max_slots,
        max_positions=PAGE_SIZE * MAX_PAGES,
        max_rows=(kind.max_rows,),
    )
    graph.add(step)
    for source in (batch, pages):
        copy = graph.buffer(f"last {source.name}", source.cols, dtype=source.dtype)
        for rank in range(num_ranks):
            graph.add(Put(rank, f"copy {source.name}", src=source.at(rank), dst=copy.at(rank)))
    return graph


def found(session: distmk.Session, kind: Kind) -> dict[str, Any]:
    """What this rank got."""
    last, end = (kind.batch.from_buffer_copy(session.view(name).tobytes()) for name in ("last batch", "batch"))
    counts, counts_at_end = (batch.batch if isinstance(batch, JobBatch) else batch for batch in (last, end))
    num_runs = counts.num_job_runs if isinstance(last, JobBatch) else counts.num_runs
    if isinstance(last, JobBatch):
        jobs = {
            "sampled": list(last.sampled[: counts.num_rows]),
            "tokens": list(last.tokens[: counts.num_job_rows]),
        }
    else:
        jobs = {}
    return {
        "num_reset_rows": counts.num_reset_rows,
        "rows": [(row.token, row.position, row.slot, row.sample) for row in last.rows[: counts.num_rows]],
        "runs": [(run.row_begin, run.num_rows, run.slot, run.kv_len) for run in last.runs[:num_runs]],
        **jobs,
        "pages": session.view("last pages").reshape(kind.num_slots, MAX_PAGES)[: kind.max_slots].tolist(),
        "stop": [counts.stop, counts_at_end.stop],
        "rows at the end": counts_at_end.num_rows,
    }


def main() -> None:
    backend, launches, kind = sys.argv[1], json.loads(sys.argv[2]), KINDS[sys.argv[3]]
    with distmk.connect() as bootstrap:
        graph = step_graph(bootstrap.world_size, kind)
        with distmk.Session(graph, bootstrap, backend=backend) as session:
            candidates = np.array([(1.0, TOKEN)] * kind.num_slots * bootstrap.world_size, "f4, i4").view(np.uint8)
            session.backend.write(session.program.placement.buffers[graph.buffers[0]], 0, candidates[None])
            table = session.program.placement.buffers[next(b for b in graph.buffers if b.name == "pages")]
            for prompts, max_new in launches:
                session.backend.write(table, 0, np.full((1, kind.num_slots * MAX_PAGES), UNSET, np.int32))
                bootstrap.barrier()
                spec = LaunchSpec(tuple(map(tuple, prompts)), (max_new,) * len(prompts), ignore_eos=True)
                running = session.launch(spec if bootstrap.rank == 0 else LaunchSpec())
                tokens = [(event.request, event.token, event.iteration) for events in running for event in events]
                bootstrap.barrier()
                ranks = bootstrap.allgather(json.dumps(found(session, kind)).encode())
                bootstrap.barrier()
                if bootstrap.rank == 0:
                    print(json.dumps({"tokens": tokens, "ranks": [json.loads(rank) for rank in ranks]}))


if __name__ == "__main__":
    jobs.run(main)
