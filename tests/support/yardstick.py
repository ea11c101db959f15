"""How slow this machine is now, for bounds on times in tests."""

from __future__ import annotations

import time

USUAL_S = 0.03  # on one core of 2026 that does nothing else


def slowness() -> float:
    """How many times longer than usual a loop takes now, at least 1: the factor by which to multiply a bound in seconds.

    The time is that of the clock on the wall, so a machine that is busy with other processes counts as slow, too.
    """
    began_s, total = time.perf_counter(), 0
    for i in range(300_000):
        total += i * i
    return max(1.0, (time.perf_counter() - began_s) / USUAL_S)
