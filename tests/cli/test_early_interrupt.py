"""Ctrl-C before the command has begun ends it in one line, without a traceback of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.helpers import ROOT, Runner

AT_IMPORT = """
import os, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupt())
"""
SCRIPT = "import sys; from distmk.__main__ import main; sys.exit(main())"  # what pip installs as `distmk`


@pytest.mark.parametrize("module", ["distmk.cli", "argparse", "numpy", "distmk.cli.lab_command"])
@pytest.mark.parametrize("command", [["-m", "distmk"], ["-c", SCRIPT]], ids=["module", "script"])
def test_interrupt_during_imports(module: str, command: list[str], runner: Runner) -> None:
    (runner.folder / "sitecustomize.py").write_text(AT_IMPORT.format(module=module, number=2))
    path = {"PYTHONPATH": f"{runner.folder}:{ROOT}"}
    done = runner.run([sys.executable, *command, "check", "--model", "qwen3-8b"], path)
    assert (done.status, done.stdout, done.stderr) == (130, "", "distmk: interrupted\n")


def test_an_ignored_interrupt_stays_ignored(runner: Runner) -> None:
    """As a shell starts a command in the background."""
    (runner.folder / "sitecustomize.py").write_text(AT_IMPORT.format(module="argparse", number=2))
    path = {"PYTHONPATH": f"{runner.folder}:{ROOT}"}
    shell = 'trap "" INT; exec "$@"'
    done = runner.run(["bash", "-c", shell, "bash", sys.executable, "-m", "distmk", "--version"], path)
    assert done.status == 0 and done.stdout.startswith("distmk ")


def test_what_is_imported_before_it_listens() -> None:
    """Only what Python has loaded anyway: everything else takes time, in which Ctrl-C is Python's."""
    code = "import sys; before = set(sys.modules); import distmk.__main__; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) <= {"__future__", "distmk", "distmk.__main__", "os", "stat", "posixpath", *OF_OS}


OF_OS = {"_stat", "genericpath", "os.path", "abc", "_abc", "_collections_abc"}
