"""What an engine does at one moment, for metrics and for people who watch it."""

from __future__ import annotations

import time
from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest iterations in their mean time


@dataclass(frozen=True)
class EngineStats:
    """Requests, KV memory and work of an engine. Counts of work (from `num_iterations` on) are totals since it started."""

    num_running: int  # sequences in the batch
    num_waiting: int  # sequences that wait for a slot or for pages
    num_kv_pages: int
    num_free_kv_pages: int
    num_iterations: int
    iteration_ms: float  # mean over the last iterations
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int  # sequences put back because no page was left
    num_prefix_hits: int  # prompt tokens whose keys and values were cached

    @property
    def kv_usage(self) -> float:
        """The share of KV pages in use, 0 to 1."""
        return 1 - self.num_free_kv_pages / self.num_kv_pages if self.num_kv_pages else 0.0


@dataclass
class WorkCounter:
    """Counts the work of an engine over all its launches, for `EngineStats`."""

    num_iterations: int = 0
    iteration_ms: float = 0.0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    _before: tuple[float, int] | None = None  # the time and the launch's iterations at the last step of a busy time

    def step(self, iterations: int, num_tokens: int, idle: bool) -> None:
        """Some tokens came of a launch that has done `iterations`; `idle`: no request is left."""
        now_s = time.perf_counter()
        before, self._before = self._before, None if idle else (now_s, iterations)
        self.num_generated_tokens += num_tokens
        if before is None:
            return
        since_s, done = before
        if (new := iterations - done) > 0:
            mean_ms = 1e3 * (now_s - since_s) / new
            self.iteration_ms += (mean_ms - self.iteration_ms) * (_WEIGHT if self.iteration_ms else 1.0)
            self.num_iterations += new
