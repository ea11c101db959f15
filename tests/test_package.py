"""What is shipped is whole, and generated files are up to date."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import symtable
import sys
import zipfile
from pathlib import Path

import pytest
from support.helpers import ROOT, Runner

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the repository, as a build leaves folders behind."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    for part in ("distmk", "csrc", "examples"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / part).exists():
            shutil.copy(ROOT / part, copy)
    code = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_wheel_is_whole(wheel: Path) -> None:
    """Every module and every source file is in it, under the names they are looked for."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith("distmk-")}
    python = {path.relative_to(ROOT).as_posix() for path in (ROOT / "distmk").rglob("*.py")}
    suffixes = (".h", ".cpp", ".cu", ".cuh")
    sources = {path.relative_to(ROOT / "csrc") for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes}
    assert "distmk/check/__init__.py" in python and sources
    rungs = [path for path in (ROOT / "examples" / "launch_lab").iterdir() if path.suffix in (".py", *suffixes)]
    want = python | {f"distmk/_csrc/{path.as_posix()}" for path in sources}
    want |= {f"distmk/_launch_lab/{path.name}" for path in rungs}
    assert held - {"distmk/py.typed"} == want, f"missing {sorted(want - held)}, not wanted {sorted(held - want)}"


def test_unpacked_wheel_runs(wheel: Path, tiny_model: Path, runner: Runner) -> None:
    """Away from the repository it finds its own sources, compiles them and decodes."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(runner.folder / "site")
    env = {"PYTHONPATH": str(runner.folder / "site"), "DISTMK_CACHE": str(runner.folder / "cache")}
    modules = "distmk, distmk.backends.build_cache as b, distmk.lab.kernels as k"
    code = f"import {modules}; print(distmk.__file__, b.csrc_dir(), k.rungs_dir())"
    found = runner.run([sys.executable, "-c", code], env)
    assert found.stdout.split() == [
        str(runner.folder / "site" / "distmk" / name) for name in ("__init__.py", "_csrc", "_launch_lab")
    ], found.stderr
    command = ("generate", "--model", str(tiny_model), "--prompt-ids", "1,2,3", "--max-new-tokens", "4")
    away, here = runner.distmk(*command, env=env), runner.distmk(*command)
    assert away.status == 0, away.stderr
    assert away.stdout == here.stdout


def imported(path: Path) -> set[tuple[str, str]]:
    """Modules of distmk and the names that a file takes from them, wherever in the file it does so."""
    return {
        (node.module, name.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "distmk"
        for name in node.names
    }


@functools.cache
def names_of(module: str) -> set[str]:
    """What a module's source names and, of a package, its modules: some need packages that only GPU machines have."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return set()
    symbols = symtable.symtable(file.read_text(), str(file), "exec").get_symbols()
    named = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return named | {each.stem for each in path.glob("*")}


def test_what_is_imported_is_there() -> None:
    """Functions import late what only GPU machines have, and are not run elsewhere."""
    folders = ("distmk", "examples", "scripts", "tests")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    wanted = {(path, *each) for path in files for each in imported(path)}
    assert {("distmk.backends.cuda.backend", "CudaBackend"), ("distmk.backends.cuda.gpus", "num_sms_of")} <= {
        each[1:] for each in wanted
    }
    absent = [
        f"{path.relative_to(ROOT)}: no {name} in {module}"
        for path, module, name in wanted
        if name not in names_of(module)
    ]
    assert not absent, "\n".join(sorted(absent))


def test_generated_header_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_abi.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
