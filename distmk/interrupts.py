"""Ctrl-C that waits until ranks are in step again.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of an exchange between ranks
that would leave them waiting for different things, so such sections defer it to their end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 3.0  # how long a deferred Ctrl-C waits for other ranks


class _Deferral:
    """The state of the main thread."""

    depth = 0
    since_s: float | None = None  # when the deferred signal came


@contextmanager
def deferred() -> Iterator[None]:
    """A section that Ctrl-C does not cut in two: KeyboardInterrupt, if it came, is raised at its end.

    Only the main thread gets Ctrl-C; in others, and in a process that handles SIGINT in its own way, this does nothing.
    """
    if _Deferral.depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note)  # first and last: from here to there nothing is cut in two, this included
    try:
        _Deferral.depth, _Deferral.since_s = 1, None
        yield
    finally:
        _Deferral.depth, came = 0, _Deferral.since_s is not None
        signal.signal(signal.SIGINT, handler)
        if came:
            raise KeyboardInterrupt


def check_patience() -> None:
    """Raise KeyboardInterrupt, also in a deferred section, if Ctrl-C came PATIENCE_S ago: another rank does not answer."""
    since_s = _Deferral.since_s
    is_main = threading.current_thread() is threading.main_thread()
    if _Deferral.depth and is_main and since_s is not None and time.monotonic() - since_s > PATIENCE_S:
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    _Deferral.since_s = _Deferral.since_s or time.monotonic()
