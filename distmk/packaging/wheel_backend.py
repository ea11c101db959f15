"""The build backend that pyproject.toml names: setuptools, which can also put compiled kernels into a wheel.

    python -m build --wheel -C kernels=all      # or some of them: -C kernels=sm_90a,sm_100a

makes a wheel for Linux on x86-64 that holds the kernels of `distmk build`, so that a machine with GPUs needs no compiler. Any
other build (a wheel without the setting, an sdist, an editable install) is pure Python, and compiles kernels at first use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, str | list[str]]

# The wheel holds no code for CPUs. The tag names the hosts for which kernels and their NVSHMEM are made.
PLATFORM = "manylinux_2_17_x86_64"
SOURCES = ("distmk", "csrc", "examples", "pyproject.toml", "LICENSE", "README.md")
KERNELS = Path("distmk", "gpu-kernels")  # where `distmk.backends.cuda.build` looks


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Packages that the build needs. To compile kernels it needs the dependencies of distmk, and compilers."""
    if not _architectures(config_settings):
        return list(build_meta.get_requires_for_build_wheel())
    import tomllib  # from Python 3.11

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["build"]]


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel in the folder; returns its name."""
    architectures = _architectures(config_settings)
    if not architectures:
        return str(build_meta.build_wheel(wheel_directory, None, metadata_directory))
    folder, root = str(Path(wheel_directory).resolve()), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="distmk-wheel-") as scratch:
        _copy_sources(root, Path(scratch))
        _compile(architectures, root, Path(scratch) / KERNELS)
        os.chdir(scratch)  # a build backend works on the current folder
        try:
            return str(build_meta.build_wheel(folder, {"--build-option": ["--plat-name", PLATFORM]}))
        finally:
            os.chdir(root)


def _architectures(settings: Settings | None) -> list[str]:
    """The architectures that `-C kernels=...` names, once or several times."""
    given = (settings or {}).get("kernels", "")
    return [name for text in ([given] if isinstance(given, str) else given) for name in text.split(",") if name]


def _copy_sources(root: Path, folder: Path) -> None:
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, folder)


def _compile(architectures: Sequence[str], root: Path, folder: Path) -> None:
    """Put kernels into `folder`, from the cache or compiled into it.

    SystemExit: there is an error, which `distmk build` has written to stderr.
    """
    environment = {name: value for name, value in os.environ.items() if name != "DISTMK_NVCC_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    options = [part for name in architectures for part in ("--arch", name)]
    command = [sys.executable, "-m", "distmk", "build", *options, "--output", str(folder)]
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit("the kernels of the wheel could not be compiled")
