"""How commands and scripts end: with the exit status of an error, and one line about it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from distmk.cli import siblings
from distmk.cli.together import launcher_rank
from distmk.console import tell
from distmk.errors import BrokenOutputError, DistmkError, Interrupted, OwnUsageError, RankLostError, one_line
from distmk.interrupts import signals_to

_REPORT_S = 0.5
"""A rank that reports nothing waits so long before it ends: once one has ended, launchers end the others, rank 0 among them."""

_SAME_MISTAKE_S = 2.0
"""Within this time the ranks of a host meet a mistake that all of them make."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Call a script's `main` and exit with what it returns, or with an error's status after one line about it.

    Among ranks that a launcher started, one reports what all of them share, and each what only it knows.
    """
    sys.exit(status_of(main))


def status_of(run: Callable[[], int | None]) -> int:
    """What `run` returns (None: 0), or the exit status of its error, which is reported."""
    try:
        return run() or 0
    except KeyboardInterrupt as interrupt:
        error = _on_its_way(interrupt) or Interrupted("interrupted")
    except DistmkError as caught:
        error = caught
    with signals_to(signal.SIG_IGN):  # launchers send one to the ranks that are left when one has died
        return report(error)


def _on_its_way(interrupt: KeyboardInterrupt) -> DistmkError | None:
    """The error that a launcher's signal to end came upon, once another rank had ended for it."""
    before = interrupt.__context__
    return before if isinstance(before, DistmkError) else None


def report(error: DistmkError) -> int:
    """Say what went wrong; returns the exit status.

    Rank 0 reports an error that all ranks share, and every rank that noticed a lost rank reports that. A mistake that a rank
    meets without the others, it reports itself; where several ranks of a host meet the same one, the first of them does.
    """
    if isinstance(error, BrokenOutputError):
        return error.exit_code
    rank, text = launcher_rank(), one_line(error) if error.exit_code == 2 else str(error)
    is_own, may_have_siblings = isinstance(error, OwnUsageError), siblings.may_exist()
    reports = rank == 0 or is_own or isinstance(error, RankLostError)
    if reports and (not may_have_siblings or error.exit_code != 2 or siblings.is_first_to_say(text)):
        tell(f"rank {rank}: {text}" if rank and is_own else text)
    if may_have_siblings:
        time.sleep(_REPORT_S if not reports else _SAME_MISTAKE_S if is_own else 0.0)
    return error.exit_code
