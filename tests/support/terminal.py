"""A command in a terminal of its own, as if a person typed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

from support.helpers import Runner

_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """`shown` is what the command wrote since the last `wait_for`."""

    def __init__(self, runner: Runner, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            env=runner.environment() | {"TERM": "dumb"},
            cwd=runner.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._read = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """What is shown up to `text`, and with it."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self._read:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not shown in {timeout_s:g} s, but {self._read[-2000:]!r}"
            try:
                self._read += os.read(self._master, 1 << 16)
            except OSError:  # the command has ended
                raise AssertionError(f"ended without {text!r}, after {self._read[-2000:]!r}") from None
        before, _, self._read = self._read.partition(text.encode())
        return before.decode(errors="replace") + text

    def close(self) -> None:
        """Kill the command if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)
