"""The streaming probe measures a plausible bandwidth, not a higher one with fewer copies in flight."""

from __future__ import annotations

import pytest
from support.machine import require

from distmk.backends.cuda.probe import read_bandwidth


@pytest.mark.gpu
def test_read_bandwidth() -> None:
    require("cuda")
    speeds = {copies: read_bandwidth(0, 1 << 30, copies) for copies in (1, 6, None)}
    assert all(1e11 < speed < 2e13 for speed in speeds.values()), speeds
    assert speeds[1] < 1.02 * speeds[6], speeds
