"""The toolchain for GPUs, nvcc and NVSHMEM's device library, found on this machine. Needs no GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import compiler_env
from distmk.backends.compiler_output import first_error
from distmk.console import tell
from distmk.errors import BuildError

OLDEST_CUDA = 13
ADVICE = "pip install 'distmk[build]'"


@dataclass(frozen=True)
class Toolchain:
    """`nvcc` has nvlink in its folder; `nvshmem` is the folder of NVSHMEM's headers and device library."""

    nvcc: Path
    nvcc_version: str  # like 13.0.88
    nvshmem: Path

    @property
    def nvlink(self) -> Path:
        return self.nvcc.with_name("nvlink")

    @property
    def nvshmem_version(self) -> str:
        """The version, like 3.4.5."""
        return nvshmem_version(self.nvshmem)

    def content(self) -> list[str]:
        """Ingredients of a cache key, independent of paths: the compiler's version, a hash of NVSHMEM's files."""
        headers = [path for path in (self.nvshmem / "include").rglob("*") if path.is_file()]
        digest = hashlib.sha256()
        for path in sorted([self.nvshmem / "lib" / "libnvshmem_device.a", *headers]):
            digest.update(path.relative_to(self.nvshmem).as_posix().encode() + path.read_bytes())
        return [self.nvcc_version, digest.hexdigest()]


def find_toolchain() -> Toolchain:
    """nvcc and NVSHMEM. BuildError: one is missing or too old."""
    nvcc, version = find_nvcc()
    return Toolchain(nvcc, version, find_nvshmem())


def find_nvcc() -> tuple[Path, str]:
    """nvcc from CUDA_HOME, else PATH, else the pip packages, and its version. BuildError: there is none, or it is too old."""
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [root / "cu13" / "bin" / "nvcc" for root in _nvidia_packages()]
    nvcc = next((path for path in candidates if path.exists()), None)
    if nvcc is None:
        raise BuildError(f"no nvcc: set CUDA_HOME, put it on PATH, or {ADVICE}")
    match = re.search(r", V(\d+)(\.\d+)+", run([nvcc, "--version"]))
    version = match[0].removeprefix(", V") if match else "unknown"
    if match is None or int(match[1]) < OLDEST_CUDA:
        raise BuildError(f"{nvcc} is of CUDA {version}; {OLDEST_CUDA}.0 or newer is needed: set CUDA_HOME, or {ADVICE}")
    return nvcc, version


def find_nvshmem() -> Path:
    """NVSHMEM's folder: NVSHMEM_HOME, else the pip package. BuildError: there is no device library in it."""
    given = env.nvshmem_home()
    for root in [given] if given else [packages / "nvshmem" for packages in _nvidia_packages()]:
        if (root / "lib" / "libnvshmem_device.a").exists():
            return root
    raise BuildError(f"no NVSHMEM device library{f' in {given}' if given else ''}: set NVSHMEM_HOME, or {ADVICE}")


def cuda_home(nvcc: Path) -> Path:
    """The folder of CUDA that nvcc compiles with; nvcc may be a script in another folder.

    BuildError: nvcc does not name the folder.
    """
    match = re.search(r"^#\$ TOP=(.+)$", run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE)
    if match is None:
        raise BuildError(f"{nvcc} --dryrun names no folder of CUDA; set CUDA_HOME to another one")
    return Path(match[1].strip()).resolve()


def nvshmem_version(root: Path) -> str:
    """The version of the NVSHMEM in `root`, like 3.4.5; `unknown` if its headers do not say."""
    try:
        text = (root / "include" / "non_abi" / "nvshmem_version.h").read_text()
    except OSError:
        return "unknown"
    parts = re.findall(r"NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", text)
    return ".".join(parts) or "unknown"


def run(command: Sequence[str | Path], scratch: Path | None = None, own_files: Sequence[Path] = ()) -> str:
    """Run `command` with its temporary files in `scratch`, and return its output.

    BuildError: it failed; the text has the first error of its output (`first_error`).
    """
    environment = compiler_env(scratch) if scratch else None
    tell(f"runs {shlex.join(map(str, command))}", "debug")
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    output = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed: {first_error(output, own_files)}")
    return output


def _nvidia_packages() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(path) for path in spec.submodule_search_locations or ()] if spec else []
