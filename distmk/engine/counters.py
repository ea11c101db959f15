"""Totals of an engine's work, and the pace of its iterations, as its host side sees them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from distmk.engine.stats import DraftStats

_WINDOW_S = 1.0


@dataclass
class Counters:
    """Totals since the engine started. `num_prefix_hits`: prompt tokens whose keys and values were cached."""

    num_iterations: int = 0  # of launches that are over
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)  # of launches that are over
    num_repeated_rows: int = 0  # of launches that are over


@dataclass
class Pace:
    """Mean time of an iteration within about a second."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)  # time and iterations of a launch so far
    iteration_ms: float = 0.0

    def note(self, now_s: float, iterations: int) -> None:
        """`iterations` are done at `now_s`, and there was work since the last call."""
        seen = self._seen
        if seen and iterations <= seen[-1][1]:
            return
        seen.append((now_s, iterations))
        while len(seen) > 2 and seen[1][0] <= now_s - _WINDOW_S:
            seen.popleft()
        if len(seen) > 1:
            (begin_s, begin), (end_s, end) = seen[0], seen[-1]
            self.iteration_ms = 1e3 * (end_s - begin_s) / (end - begin)

    def rest(self) -> None:
        """There is no work: the time until the next iteration does not count."""
        self._seen.clear()
