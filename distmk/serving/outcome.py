"""How each rank left a launch, and the error that all ranks make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from distmk.abi import Abort
from distmk.backends.base import StuckWait
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.messages import gather_json, malformed
from distmk.errors import WaitRecord


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
    value = {
        "reason": int(mine.reason),
        "stuck": [asdict(wait) for wait in mine.stuck],
        "iterations": mine.iterations,
        "left": mine.left,
    }
    patient = mine.left or mine.reason is Abort.NONE
    with contextlib.nullcontext() if patient else bootstrap.losing_stopped_ranks():
        values = gather_json(bootstrap, value)
    return [_read(value, rank) for rank, value in enumerate(values)]


def _read(value: Any, rank: int) -> Outcome:
    try:
        stuck = tuple(_read_wait(wait) for wait in value["stuck"])
        return Outcome(Abort(value["reason"]), stuck, _typed(value["iterations"], int), _typed(value["left"], bool))
    except (KeyError, TypeError, ValueError):
        raise malformed(f"rank {rank}", "no outcome of a launch") from None


def _read_wait(value: Any) -> StuckWait:
    kinds = {"task": str, "event": str, "expired": bool}
    return StuckWait(**{each.name: _typed(value[each.name], kinds.get(each.name, int)) for each in fields(StuckWait)})


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def first_stuck(outcomes: Sequence[Outcome]) -> WaitRecord:
    """The first stuck wait in program order over all ranks: the others wait because of it."""
    waits = [(wait, rank) for rank, outcome in enumerate(outcomes) for wait in outcome.stuck]
    if not waits:
        return WaitRecord(-1, -1, "none", "start of an iteration", 1, 0)
    wait, rank = min(waits, key=lambda pair: (pair[0].iteration, pair[0].order))
    return WaitRecord(rank, wait.worker, wait.task, wait.event, wait.want, wait.got)
