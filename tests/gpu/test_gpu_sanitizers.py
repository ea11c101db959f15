"""compute-sanitizer on a tiny program: a few iterations in which every role of the kernel runs.

    python -m pytest -q -rs tests/gpu/test_gpu_sanitizers.py             # 1 GPU, a minute or two a tool
    python -m pytest -q -rs tests/gpu/test_gpu_sanitizers.py -k memcheck

Needs compute-sanitizer on PATH or in CUDA_HOME/bin. racecheck and synccheck look at shared memory and barriers inside a
block; order between blocks and GPUs is for distmk.check and the host twin under ThreadSanitizer. For racecheck the kernel is
compiled so that every lane arrives at barriers for itself and flags are atomic (csrc/platform/device.h): it knows no other order.
With iterations of jobs it reports hazards that are none (csrc/DEBUGGING.md): only those in EXPLAINED may appear.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.helpers import Runner
from support.machine import environment, require

HERE = Path(__file__).parent

FOUND = 99
DEADLINE_S = "600"  # instrumented code is slow, which is no hang
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Functions whose accesses racecheck takes for a race with each other, if it sees iterations of jobs: (one, the other).
COPIES = r"copy_(kept|expected)"
EXPLAINED = (
    (COPIES, r".*"),  # the rings of products, where mbarriers alone order copies, and what was in their memory before
    (r"barrier_init", r"jobs::plan_job|barrier_(arrive|test)|expect_bytes"),  # barriers of each task, in reused memory
    (
        r"set_up|RankState::RankState",
        r".*",
    ),  # a turn's state, two __syncthreads away from the turn before (change_turn)
    (r"CachedTasks::List::poll_batch", r"load_guess<.*"),  # a guess that is checked later
)
ACCESS = re.compile(
    r"(Race reported between|and) (?:Write|Read|Atomic) access at (?:\w+ )?(?:void )?(?:T1 )?(?:distmk::)?([^(+]+)"
)


def sanitizer() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home) / "bin"))
    if found is None:
        pytest.skip("no compute-sanitizer on PATH or in CUDA_HOME/bin")
    return found


def hazards(report: str) -> Iterator[tuple[str, str]]:
    """The functions of the two accesses of each hazard that racecheck reports."""
    first = ""
    for line in report.splitlines():
        if found := ACCESS.search(line):
            name = found[2].strip()
            if found[1] == "and":
                yield first, name
            else:
                first = name


def is_explained(pair: tuple[str, str]) -> bool:
    return any(
        re.fullmatch(one, a) and re.fullmatch(other, b) for one, other in EXPLAINED for a, b in (pair, pair[::-1])
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "buckets"), [("memcheck", ""), ("racecheck", "16"), ("racecheck", ""), ("synccheck", "")]
)
def test_clean(tmp_path: Path, tool: str, buckets: str) -> None:
    require("cuda")
    runner = Runner(tmp_path, timeout_s=850)
    # Libraries make driver calls that fail on purpose; those are no fault of the kernel.
    options = ["--error-exitcode", str(FOUND), "--kernel-regex", "kns=distmk_megakernel", "--report-api-errors", "no"]
    options += ["--print-limit", "1000"]
    command = [sanitizer(), "--tool", tool, *options, sys.executable, str(HERE / "tiny_job.py"), "cuda"]
    flags = "-DDISTMK_RACECHECK" if tool == "racecheck" else ""
    settings = environment(DISTMK_DEADLINE_S=DEADLINE_S, DISTMK_NVCC_FLAGS=flags, DISTMK_ROW_BUCKETS=buckets)
    done = runner.run(command, settings)
    text = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not support this machine")
    has_jobs = tool == "racecheck" and not buckets
    assert done.status == 0 or (has_jobs and done.status == FOUND), f"status {done.status}\n{text[-6000:]}"
    assert "tokens [[" in text and ("SUMMARY: 0 " in text or has_jobs), text[-3000:]
    wrong = sorted({pair for pair in hazards(text) if not is_explained(pair)})
    assert not wrong, "\n".join(" and ".join(pair) for pair in wrong)
    runner.check_nothing_left()


def test_reports_are_read() -> None:
    report = """\
========= Error: Race reported between Write access at distmk::copy_expected(unsigned int, const void *)+0x1fc0 in ptx.cuh:233
=========     and Write access at void distmk::jobs::multiply_job<(unsigned int)64>(unsigned int)+0x2 in mainloop.cuh:187
=========     and Read access at distmk::load_shared(unsigned int)+0xf90 in ptx.cuh:309 [14336 hazards]
=========
========= Error: Race reported between Write access at distmk::barrier_init(unsigned long *, unsigned int)+0x6840 in ptx.cuh:143
=========     and Read access at distmk::CachedTasks::List::task(unsigned int)+0x2a80 in task_queue.cuh:204 [32 hazards]
"""
    found = list(hazards(report))
    assert [pair[0] for pair in found] == ["copy_expected", "copy_expected", "barrier_init"]
    assert found[1:] == [("copy_expected", "load_shared"), ("barrier_init", "CachedTasks::List::task")]
    assert [is_explained(pair) for pair in found] == [True, True, False]
