"""One rank of a scenario: its choices, its graph and session, and that every event counted what it should."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

import distmk
from distmk.abi import EVENT_STRIDE_BYTES, LaunchKind, Space
from distmk.program.layout import Placed


class Job:
    """One scenario on one rank."""

    def __init__(self, options: dict[str, Any], bootstrap: Any) -> None:
        self.options, self.bootstrap = options, bootstrap
        self.rank, self.num_ranks = bootstrap.rank, bootstrap.world_size
        self.workers, self.iterations = options.get("workers", 1), options.get("iterations", 50)
        self.total = 0

    def graph(self) -> distmk.Graph:
        num_ranks = self.options.get("graph_ranks", self.num_ranks)
        return distmk.Graph(num_ranks, self.workers, self.options.get("schedulers"))

    def session(self, graph: distmk.Graph) -> distmk.Session:
        threads = self.options.get("threads", False)
        return distmk.Session(graph, self.bootstrap, deadline_s=15, scheduler_threads=threads)

    def run(self, session: distmk.Session, iterations: int | None = None) -> None:
        n = self.iterations if iterations is None else iterations
        assert session.run(n) == n
        self.bootstrap.barrier()
        self.check_events(session, n)
        self.total += n

    def check_events(self, session: distmk.Session, iterations: int) -> None:
        """Every event of this rank counted what its triggers of all ranks add up to, no more and no less."""
        want: dict[int, int] = defaultdict(int)
        for part in session.program.ranks:
            for desc in part.tasks:
                times = desc.max_instances * part.header.num_schedulers if desc.launch == LaunchKind.MASSIVE else 1
                for trigger in part.triggers[desc.trigger_begin : desc.trigger_begin + desc.num_triggers]:
                    if trigger.rank == self.rank:
                        want[trigger.event] += trigger.amount * times * iterations
        header = session.rank_program.header
        if not header.num_events:
            return
        events = Placed("events", Space.HEAP, -1, header.events_heap_offset, header.num_events, EVENT_STRIDE_BYTES)
        got = session.backend.view(events, np.uint64)[:, 0]
        assert got.tolist() == [want[event] for event in range(header.num_events)]
