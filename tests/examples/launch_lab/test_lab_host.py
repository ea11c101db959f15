"""The lab without a GPU: the command, user mistakes, the rungs that run on the host, and the reference."""

from __future__ import annotations

import json
import math
import platform
import sys
from typing import Any

import numpy as np
import pytest
from lab_reports import report
from support.helpers import ROOT, Runner, assert_one_line

from lab.errors import LabError
from lab.kernels import load_rung
from lab.workload import PERIOD, check, expected, expected_items, inputs

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.timeout(150)
def test_command_without_a_gpu(runner: Runner) -> None:
    """One line says that there is no GPU; rungs 8 and 12 run on the host, and the report is written."""
    done = runner.distmk("lab", "--out", "found", env=NO_GPU)
    assert done.status == 0, done.stderr
    (line,) = [line for line in done.own_lines if "GPU" in line]
    assert "rungs 8 and 12 run on the host" in line
    assert "12    task graph" in done.stdout and "8     work queue" in done.stdout
    content = json.loads((runner.folder / "found" / "lab.json").read_text())
    assert content["machine"]["gpu"] is None and content["queue"]["where"] == "host"
    assert [each["rung"] for each in content["chain"]] == ["12"] and not content["failed"]
    assert max(content["chain"][0]["error"], content["queue"]["error"]) < 1e-5
    refused = runner.distmk("lab", "--advise", "--out", "found")
    assert_one_line(refused, "was written without a GPU")


def test_advice_of_the_command(runner: Runner) -> None:
    report().save(runner.folder)
    done = runner.distmk("lab", "--advise", "--out", ".", "--count", "1000", "--duration-us", "2", "--shapes", "fixed")
    assert done.status == 0 and "advice: graph replay (rung 3)" in done.stdout, done
    varying = runner.distmk(
        "lab", "--advise", "--out", ".", "--count", "20", "--duration-us", "2", "--shapes", "varying"
    )
    assert "advice: cooperative (rung 7)" in varying.stdout, varying


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--gpu", "-1"], ["--gpu -1", "counted from 0"]),
        (["--gpu", "first"], ["--gpu", "first"]),
        (["--out", "a_file/lab"], ["--out a_file/lab cannot be written", "name another folder"]),
        (["--advise", "--out", "empty"], ["empty/lab.json: cannot be read", "run distmk lab --out empty first"]),
        (["--advise", "--count", "0"], ["0 kernels"]),
        (["--advise", "--duration-us", "-1"], ["-1 us"]),
        (["--advise", "--shapes", "round"], ["--shapes", "round"]),
        (["--count", "3"], ["--count is for --advise"]),
    ],
)
def test_mistakes(runner: Runner, arguments: list[str], texts: list[str]) -> None:
    (runner.folder / "a_file").write_text("")
    (runner.folder / "lab").mkdir()
    report().save(runner.folder / "lab")
    assert_one_line(runner.distmk("lab", *arguments, env=NO_GPU), *texts)


@pytest.mark.whole
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_task_graph_on_the_host(num_workers: int) -> None:
    found = load_rung(12).measure(1000, "host", num_workers, 5)
    assert found.rung == "12" and found.error < 1e-6
    assert found.kernel_us.median > 0 and found.busy_us is not None and found.busy_us > 0


def test_task_graph_in_the_kernel_of_gpus() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the emulator's fibers are written for x86-64")
    assert load_rung(12).measure(3000, "emulated", 4, 4).error < 1e-6


def test_a_wrong_task_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = load_rung(12)
    monkeypatch.setattr(rung, "NUM_SINES", rung.NUM_SINES - 1)  # of the tasks only
    monkeypatch.setattr(rung, "expected", lambda num, count: expected(num, count // 19 * 20))
    with pytest.raises(LabError, match=r"rung 12: \d+ of 1000 results are wrong, first at \d+"):
        rung.measure(1000, "host", 2, 5)


def test_work_queue_on_the_host() -> None:
    """Every item is processed once; the static schedule gives all workers the same number of items."""
    found = load_rung(8).measure_host(num_items=24, repeats=2)
    assert found.where == "host" and found.error < 1e-6
    workers = len(found.static.busy_us)
    assert sum(found.queue.num_items) == sum(found.static.num_items) == 24
    assert max(found.static.num_items) - min(found.static.num_items) <= 1 and workers >= 2


def test_reference() -> None:
    """Against single calls of math.sin."""
    x = inputs(3 * PERIOD)
    assert x.dtype == np.float32 and np.array_equal(x[:PERIOD], x[PERIOD : 2 * PERIOD]) and np.abs(x).max() <= 1
    at, want = 2000, float(x[2000])
    for _ in range(40):
        want = math.sin(want)
    assert expected(3 * PERIOD, 40)[at] == pytest.approx(want, abs=1e-15)
    counts = np.array([40, 0, 3, 40])
    items = expected_items(counts, 700)
    assert items.shape == (4, 700)
    assert np.allclose(items[3], np.resize(expected(PERIOD, 40), 2800)[2100:], atol=1e-15)
    assert np.allclose(items[1], inputs(2800)[700:1400], atol=0)
    assert items[2, 5] == pytest.approx(math.sin(math.sin(math.sin(float(inputs(2800)[1405])))), abs=1e-15)


@pytest.mark.parametrize("planted", ["one sine less", "an element of another place", "not a number", "too few"])
def test_check_finds(planted: str) -> None:
    want, got = expected(5000, 400), expected(5000, 400).astype(np.float32)
    assert check("all", got, want) < 1e-7
    bad: Any = got.copy()
    if planted == "one sine less":
        bad = expected(5000, 399).astype(np.float32)
    elif planted == "an element of another place":
        bad[1500] = got[1501]
    elif planted == "not a number":
        bad[1500] = np.nan
    else:
        bad = got[:-1]
    place = "4999 results, expected 5000" if planted == "too few" else r"wrong, first at \d+"
    with pytest.raises(LabError, match=place):
        check("all", bad, want)


def test_rungs_are_small_and_complete() -> None:
    folder = ROOT / "examples" / "launch_lab"
    programs = sorted(path.name for path in folder.glob("*.py"))
    assert [int(name[:2]) for name in programs] == list(range(1, 13))
    for path in [*folder.glob("*.py"), *folder.glob("*.cu*")]:
        assert len(path.read_text().splitlines()) < 220, path.name


def test_programs_refuse_what_they_cannot_do(runner: Runner) -> None:
    program = ROOT / "examples" / "launch_lab" / "03_graph.py"
    done = runner.run([sys.executable, str(program)], NO_GPU)
    assert done.status == 2 and len(done.stderr.splitlines()) == 1, done
