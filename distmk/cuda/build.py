"""Compile csrc for a GPU architecture with nvcc and link the NVSHMEM device library; no GPU is needed for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from distmk import env
from distmk.build_cache import cached, csrc_dir
from distmk.errors import BuildError

ARCHITECTURES = ("sm_90a", "sm_100a")
FLAGS = ("-std=c++17", "-O3", "-rdc=true", "--expt-relaxed-constexpr", "-lineinfo")


def build_cubin(architecture: str) -> Path:
    """Path of the cubin for `architecture`, compiled if the cache has none for these sources, tools and flags.

    BuildError: an architecture that is not supported, no nvcc, no NVSHMEM, or sources that do not compile.
    """
    if architecture not in ARCHITECTURES:
        raise BuildError(f"architecture {architecture} is not supported; choose one of {', '.join(ARCHITECTURES)}")
    nvcc, nvshmem = find_nvcc(), find_nvshmem()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()[-1:]
    library = nvshmem / "lib" / "libnvshmem_device.a"
    ingredients = [architecture, *FLAGS, *version, str(library.stat().st_size)]
    return cached(
        f"cuda-{architecture}",
        ".cubin",
        ingredients,
        [*csrc_dir().rglob("*.cuh")],
        lambda scratch: _compile(nvcc, nvshmem, architecture, scratch),
    )


def find_nvcc() -> str:
    """nvcc of CUDA_HOME, of PATH, or of the pip package of the `cuda` extra."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    if found := shutil.which("nvcc"):
        places.append(Path(found))
    if root := _nvidia_packages():
        places.append(root / "cu13" / "bin" / "nvcc")
    for place in places:
        if place.exists():
            return str(place)
    raise BuildError("no nvcc: set CUDA_HOME, put it on PATH, or pip install nvidia-cuda-nvcc")


def find_nvshmem() -> Path:
    """Folder of NVSHMEM's headers and device library: NVSHMEM_HOME, or the pip package."""
    given = env.nvshmem_home()
    root = given or (packages / "nvshmem" if (packages := _nvidia_packages()) else None)
    if root is None or not (root / "lib" / "libnvshmem_device.a").exists():
        raise BuildError("no NVSHMEM device library: pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME")
    return root


def _nvidia_packages() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def translation_unit() -> str:
    """One source that includes the kernel and every task body, so that bodies are inlined where they are dispatched."""
    bodies = sorted((csrc_dir() / "device" / "bodies").glob("*.cuh"))
    names = ["device/megakernel.cuh", *(f"device/bodies/{path.name}" for path in bodies)]
    return "".join(f'#include "{name}"\n' for name in names)


def _compile(nvcc: str, nvshmem: Path, architecture: str, scratch: Path) -> Path:
    source, obj, cubin = scratch / "distmk.cu", scratch / "distmk.o.cubin", scratch / "distmk.cubin"
    source.write_text(translation_unit())
    virtual = architecture.replace("sm_", "compute_")
    includes = [f"-I{csrc_dir()}", f"-I{nvshmem / 'include'}"]
    _run([nvcc, *FLAGS, "-gencode", f"arch={virtual},code={architecture}", "-cubin", *includes, source, "-o", obj])
    nvlink = str(Path(nvcc).with_name("nvlink"))
    _run([nvlink, f"--arch={architecture}", obj, f"-L{nvshmem / 'lib'}", "-lnvshmem_device", "-o", cubin])
    return cubin


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line or "fatal" in line]
        raise BuildError(f"{Path(command[0]).name} failed: {(lines or ['no message'])[0].strip()}")
