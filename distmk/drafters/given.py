"""Drafts that the host has put behind a request's prompt: right and wrong as a test or a measurement wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distmk.abi import DraftSource
from distmk.drafters.drafter import Drafter, DraftPlace, drafter
from distmk.graph.graph import Graph
from distmk.tasks import ProposeDrafts


@drafter("given")
@dataclass(frozen=True)
class Given(Drafter):
    """The draft of a position is the id that stands there in the request's row of `LaunchBlock.prompts`.

    Rows cost nothing here, so all drafts are verified for which there is room.
    """

    method: str = "given"
    row_cost: float | None = 0.0

    is_for_users: ClassVar[bool] = False

    def emit(self, graph: Graph, place: DraftPlace) -> None:
        num = self.num_speculative_tokens
        graph.add(ProposeDrafts(rank=0, op="given", source=DraftSource.GIVEN, max_drafts=num, **place))
