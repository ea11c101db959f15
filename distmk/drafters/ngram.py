"""Prompt lookup: what followed the first match of a sequence's last tokens (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import DraftSource
from distmk.drafters.drafter import Drafter, DraftPlace, drafter
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.parameter_checks import whole
from distmk.tasks import ProposeDrafts
from distmk.tasks.drafting import MAX_MATCH

_DEFAULT = 5  # of both lengths, as in vLLM


@drafter("ngram")
@dataclass(frozen=True)
class Ngram(Drafter):
    """The last tokens are looked for in the prompt and in the output; the longest match counts.

    prompt_lookup_max, prompt_lookup_min: the most and the fewest tokens of a match. If one is None, it is like the other;
      without both, they are 5.
    """

    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [
            whole(name, value, 1, MAX_MATCH, f"a whole number from 1 to {MAX_MATCH}")
            for name in ("prompt_lookup_max", "prompt_lookup_min")
            if (value := getattr(self, name)) is not None
        ]
        if sorted(given, reverse=True) != given:
            raise UsageError(
                f"prompt_lookup_min is {given[1]}; expected at most prompt_lookup_max, which is {given[0]}"
            )
        most, least = (given[0], given[-1]) if given else (_DEFAULT, _DEFAULT)
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", least)

    def emit(self, graph: Graph, place: DraftPlace) -> None:
        assert self.prompt_lookup_min is not None and self.prompt_lookup_max is not None  # see __post_init__
        graph.add(
            ProposeDrafts(
                rank=0,
                op="ngram",
                source=DraftSource.EARLIEST,
                max_drafts=self.num_speculative_tokens,
                min_match=self.prompt_lookup_min,
                max_match=self.prompt_lookup_max,
                **place,
            )
        )
