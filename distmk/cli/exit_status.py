"""How commands and scripts end: with the exit status of an error, and one line about it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from distmk.cli.together import launcher_rank
from distmk.console import tell
from distmk.errors import BrokenOutputError, DistmkError, Interrupted, OwnUsageError, RankLostError, one_line
from distmk.interrupts import signals_to


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Call a script's `main` and exit with what it returns, or with an error's status after one line about it.

    Among ranks that a launcher started, one reports what all of them share, and each what only it knows.
    """
    sys.exit(status_of(main))


def status_of(run: Callable[[], int | None]) -> int:
    """What `run` returns (None: 0), or the exit status of its error, which is reported."""
    try:
        return run() or 0
    except KeyboardInterrupt:
        error: DistmkError = Interrupted("interrupted")
    except DistmkError as caught:
        error = caught
    with signals_to(signal.SIG_IGN):  # launchers send one to the ranks that are left when one has died
        return report(error)


def report(error: DistmkError) -> int:
    """Say what went wrong; returns the exit status."""
    if isinstance(error, BrokenOutputError):
        return error.exit_code
    # Rank 0 reports an error that all ranks share; every rank that noticed a lost rank reports that.
    rank, text = launcher_rank(), one_line(error) if error.exit_code == 2 else str(error)
    if rank and isinstance(error, OwnUsageError):
        tell(f"rank {rank}: {text}")
    elif rank == 0 or isinstance(error, RankLostError):
        tell(text)
    return error.exit_code
