"""One caller at a time: others wait for their turn, unless they would wait for themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from distmk.errors import UsageError

_POLL_S = 0.005


@dataclass(eq=False)
class Holder:
    """A call, or a generator that may be suspended. Made before a `try` whose `finally` sets `over`: a store of an attribute
    is the one step that Ctrl-C cannot come before. `suspended`: no thread is within it.
    """

    thread: threading.Thread = field(default_factory=threading.current_thread)
    over: bool = False
    suspended: bool = False


class Turn:
    """Held by one holder at a time, until its `over` is set; on any thread, as a generator may be collected there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Holder | None = None

    def take(self, holder: Holder) -> None:
        """Wait for the turn. UsageError: the thread of a stream that is not finished waits, or that thread has ended."""
        while not self._try(holder):
            time.sleep(_POLL_S)

    def _try(self, holder: Holder) -> bool:
        with self._lock:
            present = self._holder
            if present is None or present.over:
                self._holder = holder
                return True
        if present.over or (present.thread is not holder.thread and present.thread.is_alive()):
            return False
        raise UsageError(
            "a stream of this LLM is not finished: read it to its end, or call its close(), before the next call"
        )

    def take_over(self, holder: Holder, hurry: Callable[[], None]) -> None:
        """Take the turn as the last holder: from a stream that is suspended, or from a call that `hurry` makes end."""
        while (present := self._holder) is not None and not (present.over or present.suspended or self.is_mine()):
            hurry()
            time.sleep(_POLL_S)
        self._holder = holder

    def is_held_by(self, holder: Holder) -> bool:
        return self._holder is holder and not holder.over

    def is_mine(self) -> bool:
        """Whether this thread took the turn, or one that has ended."""
        present = self._holder
        if present is None or present.over:
            return False
        return present.thread is threading.current_thread() or not present.thread.is_alive()
