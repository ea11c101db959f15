"""Suffix decoding over a sequence's own tokens: what followed the last of the longest matches (after Oliaro et al.,
arXiv:2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distmk.abi import DraftSource
from distmk.drafters.drafter import Drafter, DraftPlace, drafter
from distmk.graph.graph import Graph
from distmk.parameter_checks import real, whole
from distmk.tasks import ProposeDrafts
from distmk.tasks.drafting import MAX_MATCH

_MOST_FACTOR = 64.0


@drafter("suffix")
@dataclass(frozen=True)
class Suffix(Drafter):
    """A match may have any length, and a longer one proposes more tokens.

    suffix_decoding_max_tree_depth: the most tokens of a match.
    suffix_decoding_max_spec_factor: the most drafts for each token of the match.
    suffix_decoding_max_cached_requests: only 0, as the tokens of other requests are not looked at.
    """

    method: str = "suffix"
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_max_cached_requests: int = 0

    required: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ("suffix_decoding_min_token_prob",)

    def __post_init__(self) -> None:
        super().__post_init__()
        depth, factor = "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor"
        whole(depth, getattr(self, depth), 1, MAX_MATCH, f"a whole number from 1 to {MAX_MATCH}")
        real(factor, getattr(self, factor), 0, _MOST_FACTOR, f"more than 0 and at most {_MOST_FACTOR:g}", above=True)
        cached = "suffix_decoding_max_cached_requests"
        whole(cached, getattr(self, cached), 0, 0, "0: the tokens of other requests are not looked at")

    def emit(self, graph: Graph, place: DraftPlace) -> None:
        graph.add(
            ProposeDrafts(
                rank=0,
                op="suffix",
                source=DraftSource.LATEST,
                max_drafts=self.num_speculative_tokens,
                max_match=self.suffix_decoding_max_tree_depth,
                drafts_per_match=round(256 * self.suffix_decoding_max_spec_factor),
                **place,
            )
        )
