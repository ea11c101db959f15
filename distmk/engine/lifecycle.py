"""The end of an LLM: closed by its user, dropped, or still open when Python exits; and what a forked child may do with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref

from distmk.bootstrap import Bootstrap
from distmk.engine.commands import command
from distmk.engine.engine import Engine
from distmk.engine.engine_thread import EngineThread
from distmk.errors import DistmkError, UsageError
from distmk.interrupts import deferred


class Lifecycle:
    """Frees an engine and leaves the ranks of `bootstrap`, once. `owner` must not be reachable from here.

    Where the other ranks are processes of this one, and where there are none, it also happens when `owner` is garbage or Python
    exits. Under a launcher all ranks must close at the same time, which only their caller can know.
    """

    def __init__(self, owner: object, bootstrap: Bootstrap, leads: bool) -> None:
        self._leads = leads  # the other ranks wait for commands
        self.engine: Engine | None = None  # set once there is one
        self.engine_thread: EngineThread | None = None  # on rank 0
        self._bootstrap = bootstrap
        self._owner_pid = os.getpid()
        self.is_closed = False
        if bootstrap.kind in ("single", "local"):
            weakref.finalize(owner, self._close_dropped).atexit = False
            # `finalize` cannot do this: at exit, all finalizers run when the first one of the process would. The LLM must be
            # closed before the bootstrap, which was made earlier.
            atexit.register(self._close_dropped)

    @property
    def is_owner(self) -> bool:
        """False in a process that was forked from the one that made the LLM."""
        return os.getpid() == self._owner_pid

    def check_usable(self) -> None:
        """UsageError: the LLM is closed, or another process's."""
        if not self.is_owner:
            raise UsageError(
                f"this LLM belongs to process {self._owner_pid}, from which this one was forked; make an LLM in the process "
                "that uses it"
            )
        if self.is_closed:
            raise UsageError("this LLM is closed; make a new one, or use it before close() and inside its with block")

    def check_owner(self) -> None:
        """UsageError: the LLM is another process's."""
        if not self.is_owner:
            self.check_usable()

    def close(self, in_step: bool = True) -> None:
        """Free everything; nothing in a forked child, because all belongs to the parent. `in_step`: the other ranks wait for
        a call.
        """
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self._close_dropped)
        if not self.is_owner:
            return
        with deferred():
            try:
                if self.engine is not None:
                    self._close_engine(self.engine, in_step)
            finally:
                self._bootstrap.close()

    def _close_engine(self, engine: Engine, in_step: bool) -> None:
        if self.engine_thread is not None:
            self.engine_thread.stop()
        with self._bootstrap.losing_stopped_ranks():
            engine.session.stop()
        if in_step and self._leads and self._bootstrap.rank == 0:
            with contextlib.suppress(DistmkError):  # a rank may be lost already
                self._bootstrap.send_command(command("close"))  # all close at the same time
        engine.close()

    def _close_dropped(self) -> None:
        if self.engine_thread is not None and self.engine_thread.is_current and self.is_owner:
            # Garbage is collected on any thread. This may be one of the threads that must end.
            threading.Thread(target=self._close_dropped).start()
            return
        with contextlib.suppress(DistmkError):  # nobody is there to handle it
            self.close()
