"""The examples run under every launcher and are short."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.helpers import ROOT, Finished, Launcher, Runner, alone, under_mpirun, under_torchrun, with_ranks

pytestmark = pytest.mark.timeout(150)

EXAMPLES = ROOT / "examples"


def run(runner: Runner, name: str, launcher: Launcher, *arguments: str) -> Finished:
    finished = runner.run(launcher([sys.executable, str(EXAMPLES / name), *arguments]))
    assert finished.status == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    return finished


def test_examples_are_short() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["allreduce.py", "decode.py", "own_model.py", "ring.py"]
    for name in names:
        assert len((EXAMPLES / name).read_text().splitlines()) < 80, name


@pytest.mark.parametrize(("launcher", "num_ranks"), [(alone, 1), (with_ranks(3), 3), (under_mpirun(2), 2)])
def test_ring(launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    finished = run(runner, "ring.py", launcher, "--laps", "30")
    total = 30 * num_ranks * (num_ranks + 1) // 2
    assert finished.stdout == f"{num_ranks} ranks, 30 laps: {total}, expected {total}\n"


@pytest.mark.parametrize("kind", ["ranks", "torchrun"])
def test_allreduce(kind: str, runner: Runner) -> None:
    launcher = with_ranks(3) if kind == "ranks" else under_torchrun(2)
    finished = run(runner, "allreduce.py", launcher, "--elements", "1000")
    # The other ranks of --ranks write to stderr, as stdout is rank 0's; under torchrun lines may run into each other.
    errors = dict(re.findall(r"rank (\d+): largest error (\d\.\d+e[+-]\d\d)", finished.stdout + finished.stderr))
    assert sorted(errors) == [str(rank) for rank in range(3 if kind == "ranks" else 2)]
    assert all(float(error) < 1e-5 for error in errors.values())


def test_decode(smollm2: Path, runner: Runner) -> None:
    """Streams the first prompt, then completes all three."""
    lines = run(runner, "decode.py", with_ranks(2), str(smollm2)).stdout.splitlines()
    assert lines[0].startswith(" Paris")
    for prompt in ("The capital of France is", "Water boils at", "Once upon a time"):
        assert sum(line.startswith(f"{prompt!r} -> ") for line in lines) == 1


@pytest.mark.parametrize(("launcher", "num_ranks"), [(with_ranks(2), 2), (under_torchrun(3), 3)])
def test_own_model(launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    """Its weights make it say the last token again."""
    lines = run(runner, "own_model.py", launcher).stdout.splitlines()
    assert lines == ["[7] -> [7, 7, 7, 7, 7]", "[1, 2, 3] -> [3, 3, 3, 3, 3]", f"{num_ranks} ranks on the host backend"]
