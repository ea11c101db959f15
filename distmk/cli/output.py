"""Output that nobody reads any more."""

from __future__ import annotations

import os
import sys


def discard_output() -> int:
    """Whoever read our output has left: drop the rest, or Python would complain at exit. Returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
