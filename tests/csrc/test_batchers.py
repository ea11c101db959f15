"""The scheduler step of job programs: by a team it leaves the same memory as by one thread, in drawn scenarios."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from support.helpers import ROOT
from support.ranks_in_process import OPTIONS, SANITIZERS, prefix, skips_without

from distmk.backends.host.build import build_sources, emulator_flags

pytestmark = pytest.mark.timeout(180)

EVENTS = {
    "cancelled",
    "end",
    "job step",
    "more than 96 rows",
    "more than a warp",
    "new page",
    "page taken again",
    "postponed",
    "preempted",
    "prompt",
    "repeated",
    "no token",
    "record",
    "score",
    "seeded",
    "turn",
    "waiting",
}


def run(name: str, flags: tuple[str, ...], num_scenarios: int) -> str:
    """What `num_scenarios` scenarios print, on success."""
    seed = random.randrange(2**31)
    csrc = ROOT / "csrc"
    sources = [Path(__file__).with_name("compare_batchers.cpp"), csrc / "emulator" / "fibers.cpp"]
    headers = [*(csrc / "device").rglob("*.cuh"), *(csrc / "emulator").rglob("*.h")]
    tool = build_sources(name, "", [*emulator_flags(), "-w", *flags], sources, headers)
    command = [*prefix(), str(tool), str(seed), str(num_scenarios)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | OPTIONS)
    assert ran.returncode == 0, f"seed {seed}: {ran.stdout}{ran.stderr[:6000]}"
    return ran.stdout


def test_team_makes_the_same_memory() -> None:
    lines = run("compare_batchers", (), 40).splitlines()
    counts = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    assert set(counts) == EVENTS and all(counts.values()), counts


@pytest.mark.slow
def test_no_lane_reads_what_another_one_may_not_have_written() -> None:
    with skips_without("thread"):
        run("compare_batchers-races", ("-g1", "-O1", "-DDISTMK_RACECHECK", *SANITIZERS["thread"]), 5)
