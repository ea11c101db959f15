"""Pauses of Python's garbage collector: while code makes millions of objects and no garbage, and while an engine is busy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SETTLED_S = 0.1  # an engine is busy for this time before objects are frozen
_IDLE_S = 1.0  # an engine is idle for this time before objects are unfrozen; a full pass may delay the next work
_GROWTH = 1.25  # growth of memory after which the collector checks objects that were frozen


@contextmanager
def no_collection() -> Iterator[None]:
    """Context manager and decorator: no garbage collection, which would walk through all objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FrozenHeap:
    """Spares a busy engine the collector's full passes, which stop all threads of Python: for 0.2 s with 400,000 objects.

    When an engine has been busy for a moment, it freezes all present objects, and the collector skips them. When it has
    been idle for a while, it unfreezes them. Freezing resets the collector's counts, so objects that are frozen again
    and again might never be checked. Therefore an idle engine makes a full pass each time that memory has grown by a
    quarter. Objects that other code has frozen are left alone.
    """

    def __init__(self) -> None:
        self._busy_since_s: float | None = None
        self._idle_since_s: float | None = None
        self._is_frozen = False
        self._num_blocks = 0  # memory blocks after the last full pass or at the first freeze

    def busy(self, now_s: float) -> None:
        """Note that the engine has requests."""
        self._idle_since_s = None
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        elif not self._is_frozen and now_s - self._busy_since_s > _SETTLED_S:
            self._busy_since_s = now_s  # the next try, if other code has frozen objects
            if gc.isenabled() and not gc.get_freeze_count():
                gc.collect(1)  # collect young garbage
                gc.freeze()
                self._is_frozen = True
                self._num_blocks = self._num_blocks or sys.getallocatedblocks()

    def idle(self, now_s: float) -> None:
        """Note that the engine has no requests."""
        self._busy_since_s = None
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s >= _IDLE_S:
            self.release()

    def release(self) -> None:
        """Unfreeze the objects."""
        self._busy_since_s = None
        if self._is_frozen:
            self._is_frozen = False
            gc.unfreeze()
            if sys.getallocatedblocks() > _GROWTH * self._num_blocks:
                gc.collect()
                self._num_blocks = sys.getallocatedblocks()
