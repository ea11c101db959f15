"""One caller at a time: others wait for their turn, unless they would wait for themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distmk.errors import UsageError
from distmk.interrupts import deferred

_POLL_S = 0.005


class Turn:
    """Held by one holder at a time: a call, or a generator that may be suspended. Ctrl-C never leaves it half taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._thread: int | None = None  # that took it

    def take(self, holder: object) -> None:
        """Wait for the turn. UsageError: this thread holds it already, by a stream that is not finished."""
        while True:
            if self.is_mine():
                raise UsageError(
                    "a stream of this LLM is not finished: read it to its end, or call its close(), before the next call"
                )
            with deferred():
                if self._lock.acquire(blocking=False):
                    self._holder, self._thread = holder, threading.get_ident()
                    return
            time.sleep(_POLL_S)  # not in a deferred section: Ctrl-C ends the wait

    def is_held_by(self, holder: object) -> bool:
        return self._holder is holder

    def is_mine(self) -> bool:
        """Whether this thread took the turn."""
        return self._thread == threading.get_ident()

    def give_back(self, holder: object) -> None:
        """End the turn of `holder`, if it has it; on any thread, as a generator may be collected there."""
        with deferred():
            if self._holder is holder:
                self._holder = self._thread = None
                self._lock.release()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A call that holds the turn."""
        holder = object()
        try:
            self.take(holder)
            yield
        finally:
            self.give_back(holder)
