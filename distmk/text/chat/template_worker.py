"""The process that renders chat templates: it gets conversations on its standard input, a socket, and answers there.

The kernel enforces the limits of each rendering, in the middle of an operation too. An allocation beyond the memory fails,
and a timer of CPU time ends the process. It has no other files, and it ends when the process that asks it has ended.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from distmk.errors import one_line
from distmk.text.chat.content import without_content
from distmk.text.chat.sandbox import RefusalError, compile_template
from distmk.text.chat.template_frames import Answer, Limits, Outcome, Task, receive, send

_STATM = Path("/proc/self/statm")
_REASON_CHARS = 300


def main() -> None:
    """Answer until the other side closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with socket.socket(fileno=0) as sock, contextlib.suppress(EOFError, OSError):
        while True:
            send(sock, _answer(Task.decode(receive(sock))))


def _answer(task: Task) -> bytes:
    try:
        with _limited(task.limits):
            return _render(task).encode()
    except MemoryError:
        return Answer(Outcome.STOPPED, f"it needs more than {task.limits.memory_bytes >> 20} MiB of memory").encode()


def _render(task: Task) -> Answer:
    try:
        template = compile_template(task.source)
    except MemoryError:
        raise
    except Exception as error:
        line = f" at line {error.lineno}" if hasattr(error, "lineno") else ""
        return Answer(Outcome.INVALID, f"{line}: {_described(error)}")
    problem = ""
    for messages in without_content([template.content.fit(message) for message in task.messages]):
        try:
            return _write(template.pieces(messages, task.variables), task.limits)
        except MemoryError:
            raise
        except RefusalError as error:
            return Answer(Outcome.REFUSED, one_line(error)[:_REASON_CHARS])
        except Exception as error:  # a template may raise anything
            problem = problem or _described(error)
    return Answer(Outcome.MISFIT, problem)


def _write(pieces: Iterator[str], limits: Limits) -> Answer:
    written, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > limits.output_chars:
            return Answer(Outcome.STOPPED, f"it writes more than {limits.output_chars >> 20} Mi characters")
        written.append(piece)
    return Answer(Outcome.TEXT, "".join(written))


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


def _described(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}{': ' if text else ''}{text[:_REASON_CHARS]}"
