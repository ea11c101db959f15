"""What an engine does at one moment, for metrics and for people who watch it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distmk.abi import MAX_DRAFTS, DraftTotals


@dataclass(frozen=True)
class DraftStats:
    """What became of drafts (`abi.DraftTotals`).

    num_drafts: how often drafts of a sequence were verified. num_draft_tokens: how many drafts these were. num_accepted: how
    many of the drafts at each place behind the last token were accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: tuple[int, ...] = (0,) * MAX_DRAFTS

    @staticmethod
    def of(totals: DraftTotals) -> DraftStats:
        return DraftStats(totals.num_drafts, totals.num_draft_tokens, tuple(totals.num_accepted))

    def __add__(self, other: DraftStats) -> DraftStats:
        accepted: Iterable[int] = map(sum, zip(self.num_accepted, other.num_accepted, strict=True))
        num_drafts, num_tokens = self.num_drafts + other.num_drafts, self.num_draft_tokens + other.num_draft_tokens
        return DraftStats(num_drafts, num_tokens, tuple(accepted))


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
    drafts: DraftStats | None = None  # None: the engine has no drafter
    num_repeated_rows: int = 0  # rows of constrained sequences that were computed again, because their mask came late

    @property
    def kv_usage(self) -> float:
        """The share of KV pages in use, 0 to 1."""
        return 1 - self.num_free_kv_pages / self.num_kv_pages if self.num_kv_pages else 0.0
