"""One caller at a time: others wait for their turn, unless they would wait for themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distmk.errors import UsageError


class Turn:
    """Held by one caller at a time, who may be a generator that is suspended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # identity of the thread that took it

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and hold it. UsageError: this thread holds it already, by a stream that is not finished."""
        if self.is_mine():
            raise UsageError(
                "a stream of this LLM is not finished: read it to its end, or call its close(), before the next call"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def is_mine(self) -> bool:
        """Whether this thread holds the turn."""
        return self._owner == threading.get_ident()
