"""`python -m distmk` and the `distmk` command. From the first import on, Ctrl-C ends it with one line."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = (
    False  # the modules typing and signal take milliseconds to import, in which Ctrl-C would show a traceback
)
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import NoReturn
else:
    import _signal as signal

_INTERRUPTED = 130


def main() -> int:
    """Run the command and return its exit status."""
    _leave_on_sigint()
    from distmk.cli import main as run

    try:
        return run()
    finally:
        _leave_on_sigint()  # while Python ends


def _leave_on_sigint() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have set it to be ignored
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: nothing has been started yet, and KeyboardInterrupt within an import would show a traceback."""
    os.write(2, b"distmk: interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
