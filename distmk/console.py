"""Output of the command: messages on stderr, and the end of a closed stdout."""

from __future__ import annotations

import os
import sys


def discard_output() -> int:
    """Discard the rest of stdout after its reader has closed the pipe, where Python would fail at exit. Returns the exit
    status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def tell(text: str) -> None:
    """Write a line to stderr in one piece, as several ranks may write at once."""
    sys.stderr.write(f"distmk: {text}\n")
    sys.stderr.flush()
