"""One rank of a scenario: its options, its graph and session, and a check of every event counter."""

from __future__ import annotations

from typing import Any

import distmk
from distmk.program.program import Program
from distmk.testing.events import expected_counts, read_counts


class Job:
    """A scenario on one rank; `total` counts its iterations."""

    def __init__(self, options: dict[str, Any], bootstrap: Any) -> None:
        self.options, self.bootstrap = options, bootstrap
        self.rank, self.num_ranks = bootstrap.rank, bootstrap.world_size
        self.workers, self.iterations = options.get("workers", 1), options.get("iterations", 50)
        self.total = 0

    def graph(self) -> distmk.Graph:
        num_ranks = self.options.get("graph_ranks", self.num_ranks)
        return distmk.Graph(num_ranks, self.workers, self.options.get("schedulers"))

    def session(self, graph: distmk.Graph | Program) -> distmk.Session:
        threads = self.options.get("threads", False)
        backend = self.options.get("backend", "host")
        return distmk.Session(graph, self.bootstrap, deadline_s=15, backend=backend, scheduler_threads=threads)

    def run(self, session: distmk.Session, iterations: int | None = None) -> None:
        n = self.iterations if iterations is None else iterations
        assert session.run(n) == n
        self.bootstrap.barrier()
        counts, expected = read_counts(session), expected_counts(session.program, self.rank, n)
        wrong = {event: pair for event, pair in enumerate(zip(counts, expected, strict=True)) if pair[0] != pair[1]}
        assert not wrong, f"rank {self.rank}: counts of events and what was expected: {wrong}"
        self.total += n
