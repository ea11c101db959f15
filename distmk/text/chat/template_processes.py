"""Chat templates are rendered by processes of their own, whose time and memory the operating system limits.

A template comes with a model from anywhere, and one operation of it can take any time and memory. The processes are fresh ones
that know nothing of this one, so that neither its GPUs and threads nor its main module matter. They start at the first
conversation, stay for the next ones, and end with this process, however it ends: then their socket closes.
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
from typing import Any

import distmk.errors
from distmk.errors import UsageError
from distmk.text.chat.template_frames import Answer, Limits, Outcome, Task, receive, send

_MAX_PROCESSES = 4  # conversations that are rendered at a time
_ANSWER_S = 60.0  # for a process that the machine lets starve, or that somebody stopped
_END_S = 5.0
_WORKER = "import sys; sys.path[:] = sys.argv[1:]; from distmk.text.chat.template_worker import main; main()"


def render(
    source: str, messages: list[dict[str, Any]], variables: dict[str, Any], limits: Limits | None = None
) -> Answer:
    """Render plain values with the template `source`. Any number of threads may call it. UsageError: no process can start."""
    global _pool
    if _pool.owner_pid != os.getpid():  # a forked child must not talk to its parent's processes
        _pool = _Pool()
    try:
        task = Task(source, messages, variables, limits or Limits()).encode()
    except ValueError as error:
        return Answer(Outcome.MISFIT, f"ValueError: {error}")
    return _pool.answer(task, limits or Limits())


def end_processes() -> None:
    """End the processes that are idle; the next conversation starts one again."""
    if _pool.owner_pid == os.getpid():
        _pool.end()


class _Process:
    """One process that renders templates, one at a time."""

    def __init__(self) -> None:
        if not sys.executable:
            raise UsageError("chat templates need the path of the Python program, but sys.executable is empty")
        # This process' own modules, and no file of the working folder that has the name of one.
        path = [*sys.path, str(Path(distmk.errors.__file__).parents[1])]
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, *path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal is not meant for it
                )
            except OSError as error:
                self._sock.close()
                raise UsageError(
                    f"cannot start a process for chat templates: {error.strerror or error}; free memory, or raise `ulimit -u`"
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


class _Pool:
    """The processes of this process; they are lent to one thread at a time."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self._idle: list[_Process] = []
        self._room = threading.BoundedSemaphore(_MAX_PROCESSES)

    def answer(self, task: bytes, limits: Limits) -> Answer:
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
        atexit.unregister(end_processes)
        atexit.register(end_processes)
        return _Process()

    def end(self) -> None:
        while self._idle:
            self._idle.pop().end()


def _reason(status: int | None, limits: Limits) -> str:
    if status == -signal.SIGPROF:
        return f"it has not ended after {limits.cpu_s:g} s"
    if status is None:
        return f"its process has not answered for {_ANSWER_S:g} s"
    ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"its process {ended}"


_pool = _Pool()
