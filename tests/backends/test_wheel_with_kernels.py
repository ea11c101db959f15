"""A wheel with kernels, made by compilers that only write a word, installed where nothing can be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.build_machine import Machine
from support.helpers import ROOT, Finished, Runner, assert_one_line

from distmk.packaging import wheel_backend

SETTINGS = "{'kernels': 'sm_90a,sm_80'}"
BUILD = f"import sys; sys.path.insert(0, 'distmk/packaging'); from wheel_backend import *; print(build_wheel('..', {SETTINGS}))"


@dataclass
class Installed:
    """A fresh environment with the wheel, and a Python package folder that hides compilers of this one."""

    runner: Runner
    python: Path
    env: dict[str, str]

    @property
    def package(self) -> Path:
        return next((self.python.parents[1] / "lib").glob("python*/site-packages/distmk"))

    def build(self, *arguments: str, env: dict[str, str] | None = None) -> Finished:
        return self.runner.run([str(self.python), "-m", "distmk", "build", *arguments], self.env | (env or {}))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", "77")
    runner = Runner(tmp_path_factory.mktemp("wheel"))
    machine = Machine(runner, runner.folder / "here", runner.folder / "calls")
    machine.set_up()
    package = machine.folder / "package"
    shutil.copytree(ROOT / "examples", package / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / part, package)
    environment = os.environ | machine.env | {"DISTMK_NVCC_FLAGS": "-G"}
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert machine.num_calls() == 2 and not (package / "distmk" / "gpu-kernels").exists()
    return machine.folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The Python of an environment with this wheel and no other package."""
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    command = [sys.executable, "-m", "pip", "--quiet", "--python", str(folder), "install", "--no-deps", "--no-index"]
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where pip finds distmk
    subprocess.run([*command, str(wheel)], check=True, timeout=120, env=elsewhere)
    return folder / "bin" / "python"


@pytest.fixture
def installed(environment: Path, runner: Runner) -> Installed:
    # This environment provides the dependencies. An empty package hides its nvcc, and PATH has no g++.
    hiding = runner.folder / "hiding"
    (hiding / "nvidia").mkdir(parents=True)
    (hiding / "nvidia" / "__init__.py").touch()
    (runner.folder / "bin").mkdir()
    env = {
        "PYTHONPATH": os.pathsep.join([str(hiding), sysconfig.get_path("purelib")]),
        "PATH": str(runner.folder / "bin"),
        "CUDA_HOME": "",
        "DISTMK_CACHE": str(runner.folder / "cache"),
    }
    return Installed(runner, environment, env)


def test_name_and_files(wheel: Path) -> None:
    """A wheel for one platform and any Python, with two kernels that pip can check."""
    assert wheel.name.endswith(f"-py3-none-{wheel_backend.PLATFORM}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("distmk/gpu-kernels/")]
        record = archive.read(next(name for name in archive.namelist() if name.endswith("/RECORD"))).decode()
    assert sorted(Path(name).suffix for name in names) == sorted([".cubin", ".json", ".sha256"] * 2)
    assert all(f"{name},sha256=" in record for name in names)


def test_kernels_are_found_without_a_compiler(installed: Installed) -> None:
    for architecture in ("sm_80", "sm_90a"):
        finished = installed.build("--arch", architecture)
        assert finished.status == 0 and finished.stdout.split()[1].startswith(
            f"{installed.package / 'gpu-kernels'}/cuda-"
        )
        assert "168 registers" in finished.stdout
    assert not Path(installed.env["DISTMK_CACHE"]).exists()
    assert_one_line(installed.build("--arch", "sm_100a"), "no kernel for sm_100a of this version", "no nvcc")
    flags = {"DISTMK_NVCC_FLAGS": "-DDISTMK_RACECHECK"}
    assert_one_line(installed.build("--arch", "sm_90a", env=flags), "no kernel for sm_90a of this version", "no nvcc")


def test_kernels_of_other_sources_and_damaged_ones_are_not_used(installed: Installed) -> None:
    """What others may write is used: so is the package's code."""
    kernel = next((installed.package / "gpu-kernels").glob("cuda-sm_90a-*.cubin"))
    source = installed.package / "_csrc" / "device" / "core" / "pipeline.cuh"
    text = source.read_text()
    kernel.chmod(0o666)
    assert installed.build("--arch", "sm_90a").status == 0
    source.write_text(f"{text}// a change\n")
    try:
        assert_one_line(installed.build("--arch", "sm_90a"), "no kernel for sm_90a of this version", "no nvcc")
    finally:
        source.write_text(text)
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[:-1])
    try:
        assert_one_line(installed.build("--arch", "sm_90a"), f"{kernel} differs from its digest", "no nvcc")
    finally:
        kernel.write_bytes(whole)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_requirements_of_a_build_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    needed = wheel_backend.get_requires_for_build_wheel({"kernels": ["sm_80", "sm_90a"]})
    assert any(name.startswith("nvidia-nvshmem") for name in needed) and any("numpy" in name for name in needed)
