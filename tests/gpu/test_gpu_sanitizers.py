"""compute-sanitizer on a tiny program: a few iterations in which every role of the kernel runs.

    python -m pytest -q -rs tests/gpu/test_gpu_sanitizers.py             # 1 GPU, a minute or two a tool
    python -m pytest -q -rs tests/gpu/test_gpu_sanitizers.py -k memcheck

Needs compute-sanitizer on PATH or in CUDA_HOME/bin. racecheck and synccheck look at shared memory and barriers inside a
block; order between blocks and GPUs is for distmk.check and the host twin under ThreadSanitizer. For racecheck the kernel is
compiled so that every lane arrives at barriers for itself and flags are atomic (csrc/platform/device.h): it knows no other order.
It reports the rings of products in jobs, where mbarriers alone order bulk copies and what was in their memory before. So it sees
slab iterations; tests/csrc/test_emulated_races.py looks at those of jobs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.helpers import Runner
from support.machine import environment, require

HERE = Path(__file__).parent

FOUND = 99
DEADLINE_S = "600"  # instrumented code is slow, which is no hang
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def sanitizer() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home) / "bin"))
    if found is None:
        pytest.skip("no compute-sanitizer on PATH or in CUDA_HOME/bin")
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_clean(tmp_path: Path, tool: str) -> None:
    require("cuda")
    runner = Runner(tmp_path, timeout_s=850)
    # Libraries make driver calls that fail on purpose; those are no fault of the kernel.
    options = ["--error-exitcode", str(FOUND), "--kernel-regex", "kns=distmk_megakernel", "--report-api-errors", "no"]
    command = [sanitizer(), "--tool", tool, *options, sys.executable, str(HERE / "tiny_job.py"), "cuda"]
    flags = "-DDISTMK_RACECHECK" if tool == "racecheck" else ""
    buckets = "16" if tool == "racecheck" else ""
    settings = environment(DISTMK_DEADLINE_S=DEADLINE_S, DISTMK_NVCC_FLAGS=flags, DISTMK_ROW_BUCKETS=buckets)
    done = runner.run(command, settings)
    text = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.status == 0, f"status {done.status}\n{text[-6000:]}"
    assert "SUMMARY: 0 " in text and "tokens [[" in text, text[-3000:]
    runner.check_nothing_left()
