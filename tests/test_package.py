"""The wheel is complete, imports name what exists, and generated files are up to date."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import symtable
import sys
import zipfile
from pathlib import Path

import pytest
from support.helpers import ROOT, Runner, assert_one_line

from distmk.backends.host.build import build

pytestmark = pytest.mark.timeout(150)

LAB = ROOT / "examples" / "launch_lab"
BACKEND = "import sys; sys.path.insert(0, 'distmk/packaging');"  # as `backend-path` of pyproject.toml


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built in a copy of the repository since a build leaves folders behind."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    for part in ("distmk", "csrc", "examples"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / part).exists():
            shutil.copy(ROOT / part, copy)
    code = f"{BACKEND} from wheel_backend import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_wheel_is_whole(wheel: Path) -> None:
    """It has every module and source file as they are here, under the names by which they are found."""
    sources = (".h", ".cpp", ".cu", ".cuh")
    page = ROOT / "distmk" / "server" / "page"
    want = {path.relative_to(ROOT).as_posix(): path for path in page.rglob("*") if path.is_file()}
    for folder, name, suffixes in (
        (ROOT / "distmk", "distmk", (".py",)),
        (ROOT / "csrc", "distmk/_csrc", sources),
        (LAB, "distmk/_launch_lab", (".py", *sources)),
    ):
        found = [path for path in folder.rglob("*") if path.suffix in suffixes]
        want |= {f"{name}/{path.relative_to(folder).as_posix()}": path for path in found}
    assert {"distmk/check/__init__.py", "distmk/_csrc/abi.h", "distmk/server/page/vendor/purify.min.js"} <= want.keys()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith("distmk-")} - {"distmk/py.typed"}
        assert held == want.keys(), f"missing {sorted(want.keys() - held)}, not wanted {sorted(held - want.keys())}"
        other = [name for name, path in want.items() if archive.read(name) != path.read_bytes()]
    assert not other, f"other content: {other}"


def test_editable_install_beside_the_clone(tmp_path: Path) -> None:
    """In the parent folder of a clone named distmk, which Python would take for a namespace package; without docstrings."""
    pytest.importorskip("setuptools", "77")
    clone = tmp_path / "distmk"
    shutil.copytree(ROOT / "distmk", clone / "distmk", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / part, clone)
    for part in ("csrc", "examples/launch_lab/lab"):
        (clone / part).mkdir(parents=True)
    code = f"{BACKEND} from wheel_backend import build_editable; print(build_editable({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); from distmk import LLM; import distmk.cli as c; "
    command = [sys.executable, "-OO", "-c", f"{code} print(LLM); c.main(['--help'])"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage: distmk" in done.stdout, done.stderr


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """The wheel unpacked, away from the repository."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def checking_compiler(path: Path) -> Path:
    """A script that takes the place of g++: it only looks whether a source and all that it includes are there, and links by
    copying the runtime that was made of the same sources here.
    """
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n'
        'for last; do :; done\ncase " $* " in *" -c "*) exec g++ -M "$@";; '
        f'*) cp {build()} "$last";; esac\n'
    )
    path.chmod(0o755)
    return path


def test_unpacked_wheel_runs(site: Path, tiny_model: Path, runner: Runner) -> None:
    """Away from the repository, the package finds its own sources, compiles them and decodes."""
    compiler = checking_compiler(runner.folder / "c++")
    env = {"PYTHONPATH": str(site), "DISTMK_CACHE": str(runner.folder / "cache"), "DISTMK_CXX": str(compiler)}
    code = "import distmk, distmk.backends.build_cache as b, distmk.cli.lab_command as c; "
    code += "print(distmk.__file__, b.csrc_dir(), c.lab_folder())"
    found = runner.run([sys.executable, "-c", code], env)
    assert found.stdout.split() == [str(site / "distmk" / name) for name in ("__init__.py", "_csrc", "_launch_lab")], (
        found.stderr
    )
    command = ("generate", "--model", str(tiny_model), "--prompt-ids", "1,2,3", "--max-new-tokens", "4")
    away, here = runner.distmk(*command, env=env), runner.distmk(*command)
    assert away.status == 0, away.stderr
    assert away.stdout == here.stdout
    assert list((runner.folder / "cache").glob("host-*.so"))


def test_launch_lab_of_an_unpacked_wheel(site: Path, runner: Runner) -> None:
    """The command, and a single rung."""
    env = {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    done = runner.distmk("lab", "--out", "found", env=env)
    assert done.status == 0 and "12    task graph" in done.stdout, done
    assert json.loads((runner.folder / "found" / "lab.json").read_text())["queue"]["where"] == "host"
    rung = str(site / "distmk" / "_launch_lab" / "12_task_graph.py")
    alone = runner.run([sys.executable, rung, "--backend", "host", "--elements", "1000"], env)
    assert alone.stdout.startswith("12: rung 12, num_elements 1000"), alone


def test_package_without_the_launch_lab(runner: Runner) -> None:
    """Everything but `distmk lab` works, and that command says in one line what is missing."""
    shutil.copytree(ROOT / "distmk", runner.folder / "site" / "distmk", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(runner.folder / "site")}
    assert "usage: distmk lab" in runner.distmk("lab", "--help", env=env).stdout
    refused = runner.distmk("lab", "--out", "found", env=env)
    assert_one_line(refused, "the launch lab (examples/launch_lab) is not installed", "reinstall distmk")
    assert not (runner.folder / "found").exists()


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of everything that a file imports from distmk and the launch lab, also inside functions."""
    return {
        (node.module, name.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("distmk", "lab")
        for name in node.names
    }


@functools.cache
def names_of(module: str) -> set[str]:
    """Names that a module's source defines and, of a package, its modules; read, not imported: some need packages of GPUs."""
    path = (LAB if module.split(".")[0] == "lab" else ROOT) / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return set()
    symbols = symtable.symtable(file.read_text(), str(file), "exec").get_symbols()
    named = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return named | {each.stem for each in path.glob("*")}


def test_imported_names_exist() -> None:
    """Also in functions that run, and import, only on machines with GPUs."""
    folders = ("distmk", "examples", "scripts", "tests")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    wanted = {(path, *each) for path in files for each in imported(path)}
    assert {
        ("distmk.backends.cuda.backend", "CudaBackend"),
        ("distmk.backends.cuda.gpus", "num_sms_of"),
        ("lab.gpu", "Gpu"),
    } <= {each[1:] for each in wanted}
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


def test_torch_is_imported_where_it_is_used() -> None:
    """Importing it takes seconds of every rank, so no module does at once, but for those that compare tasks with oracles."""
    using = {f"distmk.testing.{name}" for name in ("__main__", "arrays", "case", "launches", "memory", "simulation")}
    files = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "distmk").rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in files]
    others = [name for name in names if name not in using and not name.endswith("__main__")]
    assert "distmk.testing.events" in others
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", code, *others], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
