"""Compile csrc for the host at first use, cached by content; ranks that start together compile once."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distmk import env
from distmk.abi_header import abi_hash
from distmk.errors import BuildError

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread", "-Wall")


def csrc_dir() -> Path:
    """The C++ sources: beside the package in a checkout, inside it in an installed wheel."""
    for path in (Path(__file__).parents[2] / "csrc", Path(__file__).parents[1] / "_csrc"):
        if (path / "abi.h").exists():
            return path
    raise BuildError("the C++ sources (csrc) are not installed with this package; reinstall distmk")


def host_sources() -> list[Path]:
    return sorted((csrc_dir() / "host").rglob("*.cpp"))


def load_runtime(extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The host runtime as a library. BuildError: no compiler, unwritable cache, or it does not compile."""
    library = ctypes.CDLL(str(build(extra_flags)))
    library.distmk_abi_hash.restype = ctypes.c_uint64
    if library.distmk_abi_hash() != abi_hash():
        raise BuildError("csrc/abi.h does not match distmk/abi.py; run python scripts/gen_abi.py")
    library.distmk_start.restype = ctypes.c_void_p
    library.distmk_start.argtypes = [ctypes.c_void_p]
    library.distmk_wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    library.distmk_join.argtypes = [ctypes.c_void_p]
    library.distmk_abort.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]
    return library


def build(extra_flags: Sequence[str] = (), tool: str | None = None) -> Path:
    """Path of the compiled library, or of the program `tool` (csrc/tools) linked with it.

    Compiles if the cache has none for these sources, flags and processor.
    """
    compiler = shutil.which(env.compiler())
    if compiler is None:
        raise BuildError(f"no C++ compiler: {env.compiler()!r} not found; install g++ (C++20) or set DISTMK_CXX")
    flags = [*FLAGS, *extra_flags]
    folder = _writable(env.cache_dir())
    sources = host_sources() + ([csrc_dir() / "tools" / f"{tool}.cpp"] if tool else [])
    target = folder / f"{tool or 'host'}-{_key(compiler, flags, sources)}{'' if tool else '.so'}"
    if not target.exists():
        with _locked(target.with_name(target.name + ".lock")):
            if not target.exists():
                _compile(compiler, flags if tool else [*flags, "-shared"], sources, target)
    return target


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or str(error)
        raise BuildError(f"cannot write to the cache folder {folder} ({reason}); set DISTMK_CACHE to one you own") from None


def _key(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> str:
    """Hash of what the library is made from: contents, never paths, so that a cache can be moved."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    digest = hashlib.sha256(repr((version, list(flags), platform.machine(), _cpu_flags())).encode())
    root = csrc_dir()
    for path in sorted([*root.rglob("*.h"), *sources]):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    """-march=native means this processor's instructions: a cache may be shared with machines that lack them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    root = csrc_dir()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects, running = [], []
        for index, source in enumerate(sources):
            objects.append(f"{scratch}/{index}.o")
            command = [compiler, *flags, f"-I{root}", "-c", str(source), "-o", objects[-1]]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode:
                raise BuildError(f"the host runtime does not compile with {compiler}: {_first_error(output)}")
        linked = f"{scratch}/linked"
        link = subprocess.run([compiler, *flags, *objects, "-o", linked], capture_output=True, text=True)
        if link.returncode:
            raise BuildError(f"the host runtime does not link with {compiler}: {_first_error(link.stderr)}")
        os.replace(linked, target)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no output"]
    return lines[0].strip()
