"""What limited processes have in common: they get tasks on their standard input, a socket, and answer there.

The kernel enforces the limits of each task, in the middle of an operation too. An allocation beyond the memory fails, and a
timer of CPU time ends the process. It has no other files, and it ends when the process that asks it has ended.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from distmk.text.processes.frames import Answer, Limits, Outcome, receive, send

_STATM = Path("/proc/self/statm")


def serve(answer: Callable[[bytes], Answer]) -> None:
    """Answer tasks until the other side closes. `answer` works within `within`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with socket.socket(fileno=0) as sock, contextlib.suppress(EOFError, OSError):
        while True:
            send(sock, answer(receive(sock)).encode())


def within(limits: Limits, work: Callable[[], Answer]) -> Answer:
    """The answer of `work`. The process ends if it takes too long."""
    try:
        with _limited(limits):
            return work()
    except MemoryError:
        return Answer(Outcome.STOPPED, f"it needs more than {limits.memory_bytes >> 20} MiB of memory")


@contextlib.contextmanager
def _limited(limits: Limits) -> Iterator[None]:
    """MemoryError in the block: it takes too much. The process ends: it takes too long."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + limits.memory_bytes
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
