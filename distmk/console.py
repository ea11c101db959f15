"""What the commands write: results on stdout, messages on stderr.

A message on stderr that cannot be written is lost, and nothing else. Strings of files, names and the environment may hold
escape sequences, which a terminal would obey: every control character is written as an escape (`escaped`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TextIO

from distmk import env
from distmk.errors import BrokenOutputError, OutputError, UsageError

# C0 but for tab and line feed, DEL and C1; marks that change the direction of text; the line separators of Unicode.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """`text` with control characters as Python's escapes, such as \\x1b; tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str, end: str = "\n") -> None:
    """Write lines of a result to stdout. OutputError, UsageError: see `write_raw`."""
    write_raw(escaped(text) + end)


def write_generated(text: str) -> None:
    """Write a model's text to stdout: as it is, but for control characters on a terminal. Errors: see `write_raw`."""
    write_raw(escaped(text) if require_stdout().isatty() else text)


def write_raw(text: str) -> None:
    """Write to stdout; what its encoding lacks becomes an escape such as \\u20ac.

    OutputError: it cannot be written, as on a full disk. BrokenOutputError: its reader is gone. UsageError: it is closed.
    """
    stream = require_stdout()
    encoding = getattr(stream, "encoding", None)
    if encoding:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise BrokenOutputError("the reader of standard output is gone") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise OutputError(
            f"cannot write to standard output: {reason}; redirect it to a file on a disk with room"
        ) from None


def require_stdout() -> TextIO:
    """The standard output. UsageError: it is closed."""
    if sys.stdout is None:
        raise UsageError("standard output is closed; redirect it to a file, or to /dev/null to discard it")
    return sys.stdout


def error_stream() -> TextIO | None:
    """The standard error, for bars. None: it is closed."""
    return sys.stderr


def tell(text: str, level: str = "") -> None:
    """Write a line to stderr in one piece, as several ranks may write at once, if DISTMK_LOG asks for its level.

    level: one of `env.LOG_LEVELS`; by default "warning" for a text that begins with that word, "info" for any other.
    UsageError: DISTMK_LOG is wrong; a line of level "error" is written regardless.
    """
    if is_logged(level or ("warning" if text.startswith("warning: ") else "info")):
        tell_lines(f"distmk: {text}\n")


def is_logged(level: str) -> bool:
    """Whether lines of this level are written to stderr (DISTMK_LOG). UsageError: DISTMK_LOG is wrong."""
    return level == "error" or env.LOG_LEVELS.index(level) <= env.LOG_LEVELS.index(env.log_level())


def tell_lines(text: str) -> None:
    """Write whole lines to stderr in one piece; nothing if it is closed or cannot be written."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError), _apart():
            sys.stderr.write(escaped(text))
            sys.stderr.flush()


def keep_lines_apart(from_bars: Callable[[], AbstractContextManager[None]]) -> None:
    """Have lines on stderr written inside such a context, which takes what is drawn there out of their way."""
    global _apart
    _apart = from_bars


_apart: Callable[[], AbstractContextManager[None]] = nullcontext


def occupy_closed_descriptors() -> None:
    """Open /dev/null in place of standard streams that are closed: the next file opened would get such a descriptor, and
    whatever a library or a child process prints would land in it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)


def discard_unwritten() -> None:
    """Discard what standard streams hold and cannot write, over which Python would fail at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
