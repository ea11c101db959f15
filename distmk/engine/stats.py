"""What an engine does at one moment, for metrics and for people who watch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Requests, KV memory and work of an engine. Iterations, tokens, preemptions and hits are totals since its start."""

    num_running: int  # sequences in the batch
    num_waiting: int  # sequences that wait for a slot, for pages, or for a launch
    num_kv_pages: int
    num_free_kv_pages: int
    num_iterations: int
    iteration_ms: float  # mean over the last iterations
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int  # sequences put back because no page was left
    num_prefix_hits: int  # prompt tokens whose keys and values were cached
    oldest_waiting_s: float = 0.0  # for which the first of the waiting sequences has waited

    @property
    def kv_usage(self) -> float:
        """The share of KV pages in use, 0 to 1."""
        return 1 - self.num_free_kv_pages / self.num_kv_pages if self.num_kv_pages else 0.0
