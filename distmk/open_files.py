"""The limit on a process's open files (RLIMIT_NOFILE): whether it is enough for a rank, and errors that name it."""

from __future__ import annotations

import errno
import os
import resource

from distmk.errors import UsageError

# For each rank: its connection, its segment of shared memory, and the descriptor that a memory map of the segment
# keeps.
FILES_OF_A_RANK = 3
SPARE_FILES = 32  # compilers of the runtime, each with a pipe; modules, locks and a model
ENOUGH_FILES = 4096
ADVICE = f"raise it with ulimit -n {ENOUGH_FILES}"


def check_open_files(num_ranks: int) -> None:
    """UsageError if this process may not open as many files as one of `num_ranks` ranks needs."""
    needed = len(os.listdir("/proc/self/fd")) + FILES_OF_A_RANK * num_ranks + SPARE_FILES
    if 0 <= (limit := _limit()) < needed:
        ranks = "1 rank needs" if num_ranks == 1 else f"each of {num_ranks} ranks needs"
        raise UsageError(f"this process may open at most {limit} files, but {ranks} {needed}; {ADVICE}")


def room_for_files(spare: int = SPARE_FILES) -> int:
    """How many more files this process may open, if `spare` ones are to remain."""
    limit = _limit() if _limit() >= 0 else 1 << 30
    return max(0, limit - len(os.listdir("/proc/self/fd")) - spare)


def reason(error: OSError) -> str:
    """The text of an operating system error, with the limit on open files if that was reached."""
    text = error.strerror or str(error)
    return f"{text}: at most {_limit()} may be open here; {ADVICE}" if error.errno == errno.EMFILE else text


def _limit() -> int:
    """The limit; -1: no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
