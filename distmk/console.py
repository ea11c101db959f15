"""The output of the commands: results on stdout, messages on stderr.

If a message cannot be written to stderr, only that message is lost. Strings from files, names and the environment may
contain escape sequences, which a terminal would obey. So every control character is written as an escape (`escaped`).
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

# C0 except tab and line feed, DEL and C1; marks that change the direction of text; the line separators of Unicode.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """`text` with control characters as Python's escapes, such as \\x1b; tabs and line feeds stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def show(text: str, end: str = "\n") -> None:
    """Write lines of a result to stdout. OutputError, UsageError: see `write_raw`."""
    write_raw(escaped(text) + end)


def write_generated(text: str) -> None:
    """Write a model's text to stdout: unchanged, but on a terminal with control characters escaped. Errors: see `write_raw`."""
    write_raw(escaped(text) if require_stdout().isatty() else text)


def write_raw(text: str) -> None:
    """Write to stdout. Characters that its encoding lacks become escapes such as \\u20ac.

    OutputError: it cannot be written, for example because a disk is full. BrokenOutputError: its reader is gone.
    UsageError: it is closed.
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
    """The standard error, for bars; None if it is closed."""
    return sys.stderr


def tell(text: str, level: str = "") -> None:
    """Write a line to stderr in one piece, because several ranks may write at once, if DISTMK_LOG asks for its level.

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
    """Write lines to stderr inside such a context from now on. The context moves bars out of their way."""
    global _apart
    _apart = from_bars


_apart: Callable[[], AbstractContextManager[None]] = nullcontext


def occupy_closed_descriptors() -> None:
    """Open /dev/null in place of standard streams that are closed.

    Otherwise the next opened file would get such a descriptor, and the output of libraries and child processes would
    end up in it.
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
    """Discard what standard streams have buffered and cannot write. Otherwise Python would fail at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
