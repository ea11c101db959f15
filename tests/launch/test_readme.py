"""README's commands, word for word, as a newcomer enters them after the demo, in a fresh copy of the repository."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.helpers import ROOT, Runner, mpirun_command

pytestmark = pytest.mark.timeout(300)

SECTION = (ROOT / "README.md").read_text().partition("\n## Use\n")[2].partition("\n## ")[0]


def commands() -> list[str]:
    """The lines of the shell blocks of "Use", but for Slurm's."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith("sbatch ")]


@pytest.fixture
def fresh(runner: Runner, smollm2: Path) -> Path:
    """The repository as the demo leaves it: an environment in .venv, the model in .models."""
    mpirun_command()
    pytest.importorskip("torch")
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip("the Python of the tests is in no virtual environment")
    folder = runner.folder / "distmk"  # as git clone names it
    for name in ("distmk", "csrc", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".models").mkdir()
    (folder / ".models" / smollm2.name).symlink_to(smollm2)
    command = runner.folder / "bin" / "distmk"  # last on PATH: installed in the environment or not
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m distmk "$@"\n')
    command.chmod(0o755)
    return folder


def test_commands_of_the_readme(fresh: Path, runner: Runner) -> None:
    """All of them, in one shell, and the Python program; as root and on two cores if that is what the machine has."""
    lines = commands()
    for name in (
        "activate",
        "distmk generate",
        "distmk chat",
        "| distmk",
        "distmk check",
        "distmk doctor",
        "mpirun.sh",
        "torchrun.sh",
    ):
        assert any(name in line for line in lines), f"README shows no {name}"
    (program,) = re.findall(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    (runner.folder / "program.py").write_text(program)
    script = "\n".join(["set -eo pipefail", "cd distmk", *lines, "python ../program.py"])
    runner.timeout_s = 280
    path = f"/usr/local/bin:/usr/bin:/bin:{runner.folder / 'bin'}"
    done = runner.run(["bash", "-c", script], {"PYTHONPATH": str(fresh), "PATH": path})
    assert done.status == 0, done.stderr
    assert [line.split()[1] for line in done.own_lines if "loaded in" in line] == ["2", "1", "1", "2", "2"], done.stderr
    assert "Gravity is the force that holds the universe together" in done.stdout, done.stdout
    assert "The capital of France is Paris." in done.stdout, done.stdout
    assert "verdict   correct" in done.stdout and "host backend can run here" in done.stdout
    assert "blank completion" not in done.stderr and "Traceback" not in done.stderr
    assert "A black hole is a singularity" in done.stdout, done.stdout
