"""Ranks leave their heap together, or notice that one of them is gone."""

from __future__ import annotations

import sys

import pytest
from support.helpers import Runner
from support.yardstick import slowness

JOB = """
import os, sys, time
import distmk
from distmk.backends.host.shm import SharedHeap
with distmk.connect(3, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
    heap = SharedHeap(bootstrap, 4096)
    bootstrap.barrier()
    what, timeout_s = sys.argv[1], float(sys.argv[2])
    if bootstrap.rank == 2:
        time.sleep(0.5)
        if what == "dies":
            os._exit(9)
        if what == "stays":
            time.sleep(2)
    started = time.monotonic()
    together = heap.leave_together(timeout_s)
    if bootstrap.rank == 0:
        print(together, time.monotonic() - started)
    if what == "comes":
        bootstrap.barrier()
        heap.close()
"""


@pytest.mark.parametrize(
    ("what", "timeout_s", "together", "least_s"),
    [("comes", 20, "True", 0.3), ("dies", 20, "False", 0.3), ("stays", 0.7, "False", 0.7)],
)
def test_leave_together(runner: Runner, what: str, timeout_s: float, together: str, least_s: float) -> None:
    script = runner.folder / "job.py"
    script.write_text(JOB)
    done = runner.run([sys.executable, str(script), what, str(timeout_s)])
    answer, seconds = done.stdout.split()
    assert answer == together and least_s <= float(seconds) < 5 * slowness(), (done.stdout, done.stderr)
