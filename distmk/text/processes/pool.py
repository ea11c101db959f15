"""Processes whose time and memory are limited, for work on what strangers wrote: chat templates, grammars.

One operation of a template can take any time and memory, and so can the compilation of a grammar. The processes are fresh ones
that know nothing of this one, so that neither its GPUs and threads nor its main module matter. They start at the first task,
stay for the next ones, and end with this process, however it ends: then their socket closes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import distmk.errors
from distmk.errors import UsageError
from distmk.text.processes.frames import Answer, Limits, Outcome, receive, send

_MAX_PROCESSES = 4  # tasks of a kind that are worked on at a time
_ANSWER_S = 60.0  # for a process that the machine lets starve, or that somebody stopped
_END_S = 5.0
_WORKER = "import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


class _Process:
    """One process, which does one task at a time."""

    def __init__(self, module: str, purpose: str) -> None:
        if not sys.executable:
            raise UsageError(f"{purpose} need the path of the Python program, but sys.executable is empty")
        # This process' own modules, and no file of the working folder that has the name of one.
        path = [*sys.path, str(Path(distmk.errors.__file__).parents[1])]
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER.format(module=module), *path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal is not meant for it
                )
            except OSError as error:
                self._sock.close()
                raise UsageError(
                    f"cannot start a process for {purpose}: {error.strerror or error}; free memory, or raise `ulimit -u`"
                ) from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: bytes) -> Answer | None:
        """Its answer; None: there is none, and it is of no more use."""
        self._sock.settimeout(_ANSWER_S)
        try:
            send(self._sock, task)
            return Answer.decode(receive(self._sock))
        except (EOFError, OSError):
            return None

    def end(self, at_once: bool = False) -> int | None:
        """End it. Returns the exit status (negative: a signal) of one that ended on its own, or as it was told to."""
        self._sock.close()
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(0.0 if at_once else _END_S)
        self._process.kill()
        self._process.wait()
        return status


class ProcessPool:
    """The processes of this process for one kind of task; they are lent to one thread at a time.

    module: its `main` answers tasks (`worker.serve`). purpose: what they are for, as messages say it.
    """

    def __init__(self, module: str, purpose: str) -> None:
        self._module, self._purpose = module, purpose
        self._begin()

    def _begin(self) -> None:
        self._owner_pid = os.getpid()
        self._idle: list[_Process] = []
        self._room = threading.BoundedSemaphore(_MAX_PROCESSES)

    def answer(self, task: bytes, limits: Limits) -> Answer:
        """The answer to a task. Any number of threads may ask. UsageError: no process can start."""
        if self._owner_pid != os.getpid():  # a forked child must not talk to its parent's processes
            self._begin()
        with self._room:
            process = self._take()
            try:
                answer = process.ask(task)
            except BaseException:  # Ctrl-C: the answer is still to come
                process.end(at_once=True)
                raise
            if answer is None:
                return Answer(Outcome.STOPPED, _reason(process.end(), limits))
            if answer.outcome is Outcome.STOPPED:  # its memory is in pieces
                process.end()
            else:
                self._idle.append(process)
            return answer

    def _take(self) -> _Process:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        atexit.unregister(self.end)
        atexit.register(self.end)
        return _Process(self._module, self._purpose)

    def end(self) -> None:
        """End the processes that are idle; the next task starts one again."""
        while self._owner_pid == os.getpid() and self._idle:
            self._idle.pop().end()


def _reason(status: int | None, limits: Limits) -> str:
    if status == -signal.SIGPROF:
        return f"it has not ended after {limits.cpu_s:g} s"
    if status is None:
        return f"its process has not answered for {_ANSWER_S:g} s"
    ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"its process {ended}"
