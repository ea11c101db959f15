"""What the command writes: lines for people, and output that nobody reads any more."""

from __future__ import annotations

import os
import sys


def discard_output() -> int:
    """Whoever read our output has left: drop the rest, or Python would complain at exit. Returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def tell(text: str) -> None:
    """Write a line to stderr in one piece: several ranks may speak at once."""
    sys.stderr.write(f"distmk: {text}\n")
    sys.stderr.flush()
