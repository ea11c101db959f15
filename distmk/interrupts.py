"""Defers signals until ranks are in step again, or sends them elsewhere for a while.

Python calls signal handlers, which may raise (KeyboardInterrupt), between any two instructions of the main thread. In
the middle of an exchange between ranks this would leave the ranks waiting for different things. Such sections therefore
defer signals to their end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

PATIENCE_S = 3.0  # how long a deferred signal waits for other ranks
DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Handler:
    """Replaces a handler in Python: notes a signal that arrives during a section, and passes on any other at once."""

    def __init__(self, original: Callable[[int, FrameType | None], Any]) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not _section.depth:
            self.original(number, frame)
        elif _section.came is None:
            _section.came, _section.since_s = number, time.monotonic()


class _Section(AbstractContextManager[None]):
    """The state of the main thread."""

    depth = 0
    came: int | None = None  # the first signal of this section
    since_s = 0.0  # when that signal arrived

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self.depth:
            for number in DEFERRED:
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, _Handler):
                    signal.signal(number, _Handler(handler))
            self.came = None
        self.depth += 1  # from here on, no signal raises

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.depth -= 1
        if self.depth:
            return
        for number in DEFERRED:  # a `_Handler` that an exception leaves in place passes signals on
            handler = signal.getsignal(number)
            if isinstance(handler, _Handler):
                signal.signal(number, handler.original)
        self.raise_again()

    def raise_again(self) -> None:
        """If a signal was deferred, call its handler."""
        came, self.came = self.came, None
        handler = signal.getsignal(came) if came is not None else None
        handler = handler.original if isinstance(handler, _Handler) else handler
        if came is not None and callable(handler):
            handler(came, None)


_section = _Section()


def deferred() -> AbstractContextManager[None]:
    """A section that signals do not interrupt. If a signal arrives, its Python handler is called at the end of the section.

    In threads other than the main one, which run no handlers, it does nothing. Sections nest.
    """
    return _section


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM go to `handler`. In threads other than the main one it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)


def check_patience() -> None:
    """Call the handler of a signal that was deferred PATIENCE_S ago, even inside a section: another rank does not answer."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _section.depth and _section.came is not None and time.monotonic() - _section.since_s > PATIENCE_S:
        _section.raise_again()
