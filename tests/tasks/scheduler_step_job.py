"""What every rank of test_scheduler_step.py runs: launches of a graph in which each rank copies the row table that it got.

    python tests/tasks/scheduler_step_job.py BACKEND PROMPTS      (PROMPTS: a list of launches, each a list of prompts)

Rank 0 prints a JSON object a launch: tokens (request, token id, iteration) and, of each rank, the last batch that had rows
(num_reset_rows, rows, runs), the pages of every slot, and the batch that ended the launch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
from support import jobs

import distmk
from distmk.abi import MAX_ROWS, Batch, LaunchKind
from distmk.backends.launch_spec import LaunchSpec
from distmk.tasks import Put, SchedulerStep
from distmk.tasks.scheduling import batcher_bytes, candidates_bytes

PAGE_SIZE, NUM_PAGES, MAX_PAGES, MAX_SLOTS = 8, 9, 4, 4
TOKEN = 77  # every row's candidate
UNSET = -7  # entry of a page table before a launch


def step_graph(num_ranks: int) -> distmk.Graph:
    graph = distmk.Graph(num_ranks, 1)
    candidates = graph.buffer("candidates", candidates_bytes() * num_ranks, dtype="u8")
    batch = graph.batch = graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8")
    pages = graph.buffer("pages", MAX_ROWS * MAX_PAGES, dtype="i32")
    step = SchedulerStep(
        0,
        "scheduler_step",
        launch=LaunchKind.SCHEDULER,
        candidates=candidates.at(0),
        batch=batch.at(0),
        page_table=pages.at(0),
        state=graph.buffer("state", batcher_bytes(NUM_PAGES), dtype="u8").at(0),
        num_ranks=num_ranks,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_slots=MAX_SLOTS,
        max_positions=PAGE_SIZE * MAX_PAGES,
    )
    graph.add(step)
    for source in (batch, pages):
        copy = graph.buffer(f"last {source.name}", source.cols, dtype=source.dtype)
        for rank in range(num_ranks):
            graph.add(Put(rank, f"copy {source.name}", src=source.at(rank), dst=copy.at(rank)))
    return graph


def found(session: distmk.Session) -> dict[str, Any]:
    """What this rank got."""
    last, end = (Batch.from_buffer_copy(session.view(name).tobytes()) for name in ("last batch", "batch"))
    return {
        "num_reset_rows": last.num_reset_rows,
        "rows": [(row.token, row.position, row.slot, row.sample) for row in last.rows[: last.num_rows]],
        "runs": [(run.row_begin, run.num_rows, run.slot, run.kv_len) for run in last.runs[: last.num_runs]],
        "pages": session.view("last pages").reshape(MAX_ROWS, MAX_PAGES)[:MAX_SLOTS].tolist(),
        "stop": [last.stop, end.stop],
        "rows at the end": end.num_rows,
    }


def main() -> None:
    backend, launches = sys.argv[1], json.loads(sys.argv[2])
    with distmk.connect() as bootstrap:
        graph = step_graph(bootstrap.world_size)
        with distmk.Session(graph, bootstrap, backend=backend) as session:
            candidates = np.array([(1.0, TOKEN)] * MAX_ROWS * bootstrap.world_size, "f4, i4").view(np.uint8)
            session.backend.write(session.program.placement.buffers[graph.buffers[0]], 0, candidates[None])
            table = session.program.placement.buffers[next(b for b in graph.buffers if b.name == "pages")]
            for prompts in launches:
                session.backend.write(table, 0, np.full((1, MAX_ROWS * MAX_PAGES), UNSET, np.int32))
                bootstrap.barrier()
                spec = LaunchSpec(tuple(map(tuple, prompts)), (1,) * len(prompts), ignore_eos=True)
                running = session.launch(spec if bootstrap.rank == 0 else LaunchSpec())
                tokens = [(event.request, event.token, event.iteration) for events in running for event in events]
                bootstrap.barrier()
                ranks = bootstrap.allgather(json.dumps(found(session)).encode())
                bootstrap.barrier()
                if bootstrap.rank == 0:
                    print(json.dumps({"tokens": tokens, "ranks": [json.loads(rank) for rank in ranks]}))


if __name__ == "__main__":
    jobs.run(main)
