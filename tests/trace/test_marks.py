"""Marks of when warps reach points in a task: what the kernel records in the emulator, and the report."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from support.faults import write_config
from support.helpers import ROOT, Runner
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.abi import MARK_STEP_NS, MARKED_TASKS, Mark
from distmk.trace.marks import SHAPE, TIMES, Words, marked_tasks, marks_report, read_marks

WORKERS = 3
LINEAR = {"qkv", "o", "gate_up", "down"}


@pytest.mark.slow  # compiles an emulator for itself
@pytest.mark.timeout(200)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64")
def test_warps_write_down_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTMK_NVCC_FLAGS", "-DDISTMK_MARKS")
    model = str(write_config(tiny_config(hidden_size=192, head_dim=32), tmp_path / "config.json"))
    with LLM(model, backend="emulated", load_format="dummy", num_workers=WORKERS, max_model_len=64) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
        tasks = marked_tasks(read_marks(llm.session.backend, WORKERS), llm.session.rank_program.task_names)
    assert {task.worker for task in tasks} == set(range(WORKERS))
    assert {task.layer for task in tasks} == {0, 1} and max(task.runs_ago for task in tasks) > 1
    for task in tasks:
        where = f"{task.op} of layer {task.layer} on worker {task.worker}, {task.runs_ago} runs ago"
        known = {mark: task.us[:, i] for i, mark in enumerate(TIMES)}
        assert np.isfinite(known[Mark.ENTERED]).all() and np.isfinite(known[Mark.LEFT]).all(), where
        if task.op in LINEAR:
            for mark in (Mark.PREPARED, Mark.INPUTS, Mark.LAST):
                assert np.isfinite(known[mark]).all(), f"{mark.name} of {where}"
            assert np.isfinite(known[Mark.STORED]).any(), where
        for warp, us in enumerate(task.us):
            # Warps take turns at the reduction, so a warp's last store may come before its last products.
            for marks in (TIMES[:5] + TIMES[-1:], TIMES[:4] + TIMES[5:]):
                there = np.array([us[TIMES.index(mark)] for mark in marks])
                assert (np.diff(there[np.isfinite(there)]) >= 0).all(), f"warp {warp} in {where}: {us}"
    report = marks_report(tasks).splitlines()
    assert report[0].startswith("warps in a layer: us from qkv's inputs on"), report[0]
    assert LINEAR | {"attention"} <= {line.split()[0] for line in report[2:]}, report


def test_clocks_of_all_workers_become_one() -> None:
    """Two workers whose clocks have different speeds and origins, and wrap around, as the timer does."""
    rng = np.random.default_rng()
    words = np.zeros((2, *SHAPE[1:]), np.uint32)
    for worker, mhz in enumerate((1755.0, 1980.0)):
        _write(words[worker], mhz, int(rng.integers(1 << 32)), num_tasks=int(rng.integers(20, MARKED_TASKS)))
    names = ["layer3.b", "layer3.a", "layer4.b", "layer4.a"]  # the first ends last
    report = marks_report(marked_tasks(words, names)).splitlines()
    assert report[0].startswith("warps in a layer: us from a's inputs on")
    rows = {line.split()[0]: line for line in report[2:]}
    assert list(rows) == ["a", "b"], report
    # A task is entered every 10 us; INPUTS follow after 2 us, LEFT after 5 us, 0.1 us later on each further warp.
    for op, behind in (("a", 0.0), ("b", 10.0)):
        cells = rows[op].split("  ")
        numbers = [cell.split()[0] for cell in cells if "(" in cell]
        assert [float(x) for x in numbers] == pytest.approx([behind - 2.35, behind, behind + 3.0], abs=0.06), rows[op]


def _write(words: Words, mhz: float, clock: int, num_tasks: int) -> None:
    """The marks of a launch's last tasks on a worker: a and b of layer 3, then of layer 4, and again."""
    last_ns = (1 << 32) * MARK_STEP_NS + 30_000  # the timer wraps around three tasks before the end
    for back in range(num_tasks):
        task, place = (1, 0, 3, 2)[3 - back % 4], (num_tasks - back) % MARKED_TASKS
        ns = last_ns - 10_000 * back
        words[:, place, Mark.TASK], words[:, place, Mark.TIME] = task + 1, ns // MARK_STEP_NS % (1 << 32)
        for warp in range(SHAPE[1]):
            for mark, us in ((Mark.ENTERED, 0.0), (Mark.INPUTS, 2.0 + 0.1 * warp), (Mark.LEFT, 5.0 + 0.1 * warp)):
                words[warp, place, mark] = int(clock + (1e-3 * (ns - last_ns) + us) * mhz) % (1 << 32)


def test_nothing_is_said_of_nothing() -> None:
    assert "compiled with -DDISTMK_MARKS" in marks_report(marked_tasks(np.zeros((1, *SHAPE[1:]), np.uint32), []))


def test_the_host_twin_has_no_warps(runner: Runner) -> None:
    done = runner.run([sys.executable, str(ROOT / "scripts" / "step_marks.py"), "qwen3-8b", "--backend", "host"])
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == "distmk: the host twin has no warps; this is of a GPU's kernel\n"
