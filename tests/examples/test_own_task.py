"""The example of a task type in a package of its own: installed, and used from outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import DISTMK, QUICK_COMPILER, ROOT, Runner, assert_one_line, under_mpirun
from support.machine import require

pytestmark = pytest.mark.timeout(300)

EXAMPLE = ROOT / "examples" / "own_task"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed; beside it, its tests."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("own_task")
    source, site = folder / "source", folder / "site"
    shutil.copytree(
        EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__")
    )  # since a build leaves folders behind
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shutil.move(source / "tests", folder / "tests")
    shutil.rmtree(source)
    return site


def environment(site: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), **QUICK_COMPILER}


@pytest.mark.parametrize(
    ("selection", "num_passed"), [("not emulated", 3), pytest.param("", 5, marks=pytest.mark.slow)]
)
def test_its_own_tests(selection: str, num_passed: int, site: Path, runner: Runner) -> None:
    """On the host twin and in the emulator, each with one and two ranks."""
    require("emulated")
    runner.timeout_s = 280.0
    options = ["-q", "-p", "no:cacheprovider", "-k", selection]
    done = runner.run([sys.executable, "-m", "pytest", *options, str(site.parent / "tests")], environment(site))
    assert done.status == 0 and f"{num_passed} passed" in done.stdout, done.stdout + done.stderr


def test_run_and_trace(site: Path, runner: Runner) -> None:
    """Under a launcher, without torch; the trace is read with the package's entry point, and refused without it."""
    example = [sys.executable, "-m", "own_task", "--laps", "4", "--trace", "trace.json"]
    (runner.folder / "torch.py").write_text("raise ModuleNotFoundError('hidden by the test', name='torch')\n")
    done = runner.run(under_mpirun(2)(example), environment(site))
    assert done.stdout == "2 ranks, 4 laps: 10, expected 10\n", done
    tables = runner.run([*DISTMK, "trace", "trace.json"], environment(site))
    assert tables.status == 0 and tables.stdout.count(" axpy ") == 2, tables
    refused = runner.distmk("trace", "trace.json")
    assert_one_line(refused, "trace.json has tasks of type axpy, which is not registered; import the package")


def test_mistakes_in_bodies(site: Path, runner: Runner) -> None:
    """The compiler's message with the user's file and line, and no traceback."""
    shutil.copytree(site / "own_task", runner.folder / "own_task")
    running = []
    for backend, name in (("host", "axpy.cpp"), ("emulated", "axpy.cuh")):
        body = runner.folder / "own_task" / name
        lines = body.read_text().splitlines()
        number = next(index for index, line in enumerate(lines) if "args.a *" in line)
        lines[number] = lines[number].replace("args.a *", "args.alpha *")
        body.write_text("\n".join(lines))
        command = [sys.executable, "-m", "own_task", "--backend", backend]
        running.append((f"{body}:{number + 1}:", runner.start(command, environment(runner.folder))))
    for place, process in running:
        done = runner.finish(process)
        assert done.status == 2 and len(done.stderr.splitlines()) == 1, done
        assert "does not compile with" in done.stderr and f"{place}" in done.stderr and "'alpha'" in done.stderr, done
