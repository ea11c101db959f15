"""Output of the command: messages and progress on stderr, and the end of a closed stdout."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distmk import env

QUIET_S = 2.0  # of work before a line says what is going on
REPEAT_S = 30.0


def discard_output() -> int:
    """Discard the rest of stdout after its reader has closed the pipe, where Python would fail at exit. Returns the exit
    status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def tell(text: str) -> None:
    """Write a line to stderr in one piece, as several ranks may write at once."""
    sys.stderr.write(f"distmk: {text}\n")
    sys.stderr.flush()


@contextmanager
def progress(doing: str, shown: bool = True) -> Iterator[None]:
    """While the block runs, tell what it is `doing` once that takes QUIET_S, and the time so far every REPEAT_S.

    Not `shown`, or with DISTMK_PROGRESS=0: silent. Of blocks inside one another, the innermost speaks.
    """
    if not (shown and env.shows_progress()):
        yield
        return
    done = threading.Event()
    _under_way.append(done)
    threading.Thread(target=_report, args=(doing, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _under_way.remove(done)


_under_way: list[threading.Event] = []


def _report(doing: str, done: threading.Event) -> None:
    began, wait_s, so_far = time.perf_counter(), QUIET_S, ""
    while not done.wait(wait_s):
        if _under_way and _under_way[-1] is done:
            tell(f"{doing} ...{so_far}")
        wait_s = REPEAT_S
        so_far = f" {time.perf_counter() - began + wait_s:.0f} s so far"
