"""Signals whose handlers raise, of whatever number, wait for the end of a section."""

from __future__ import annotations

import signal
import time
from types import FrameType

import pytest

from distmk import interrupts
from distmk.interrupts import DEFERRED, check_patience, deferred


class Stopped(Exception):
    """Raised by the handlers of this file."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@pytest.mark.parametrize("number", DEFERRED)
def test_handler_runs_at_the_end(number: signal.Signals) -> None:
    old = signal.signal(number, stop)
    reached = []
    try:
        with pytest.raises(Stopped, match=str(int(number))):
            with deferred():
                with deferred():
                    signal.raise_signal(number)
                    reached.append(1)
                reached.append(2)
                signal.raise_signal(number)
            reached.append(3)
        assert signal.getsignal(number) is stop
        with pytest.raises(Stopped):
            signal.raise_signal(number)
        with deferred():
            pass  # nothing is left of the last section
    finally:
        signal.signal(number, old)
    assert reached == [1, 2]


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.01)
    old = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped), deferred():
            signal.raise_signal(signal.SIGTERM)
            check_patience()
            time.sleep(0.02)
            check_patience()
            raise AssertionError
    finally:
        signal.signal(signal.SIGTERM, old)
