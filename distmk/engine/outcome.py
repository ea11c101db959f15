"""How each rank left a launch, as the ranks tell each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from distmk.abi import Abort
from distmk.backends.launch_block import StuckWait
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.messages import gather_json, malformed
from distmk.errors import WaitRecord

_TYPES = {"int": int, "str": str, "bool": bool}
_SHAPE = {
    "reason": int,
    "stuck": [{field.name: _TYPES[str(field.type)] for field in fields(StuckWait)}],
    "iterations": int,
    "left": bool,
}


@dataclass(frozen=True)
class Outcome:
    """How one rank left a launch."""

    reason: Abort
    stuck: tuple[StuckWait, ...]
    iterations: int
    left: bool  # its caller left the launch before the end


def gather_outcomes(bootstrap: Bootstrap, mine: Outcome) -> list[Outcome]:
    """The outcomes of all ranks, in rank order. Collective. DistmkError: a rank sent something else.

    RankLostError: a rank is lost. After an interrupt or a hang that is also one that is stopped, since it may never answer.
    """
    patient = mine.left or mine.reason is Abort.NONE
    with contextlib.nullcontext() if patient else bootstrap.losing_stopped_ranks():
        found = gather_json(bootstrap, asdict(mine), "outcome of a launch", _SHAPE)
    outcomes = []
    for rank, told in enumerate(found):
        if told["reason"] not in set(Abort):
            raise malformed(f"rank {rank}", "outcome of a launch")
        stuck = tuple(StuckWait(**wait) for wait in told["stuck"])
        outcomes.append(Outcome(Abort(told["reason"]), stuck, told["iterations"], told["left"]))
    return outcomes


def first_stuck(outcomes: Sequence[Outcome]) -> WaitRecord:
    """The first stuck wait in program order over all ranks: the others wait because of it."""
    waits = [(wait, rank) for rank, outcome in enumerate(outcomes) for wait in outcome.stuck]
    if not waits:
        return WaitRecord(-1, -1, "none", "start of an iteration", 1, 0)
    wait, rank = min(waits, key=lambda pair: (pair[0].iteration, pair[0].order))
    return WaitRecord(rank, wait.worker, wait.task, wait.event, wait.want, wait.got)
