"""The rungs' programs, loaded, and their CUDA sources, compiled by distmk's toolchain into distmk's cache."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from distmk.backends.build_cache import cached, content_key
from distmk.backends.cuda.build import architecture_of
from distmk.backends.cuda.toolchain import find_nvcc, run
from distmk.errors import BuildError, UsageError

RUNGS = Path(__file__).parents[1]  # folder of the programs and CUDA sources
FLAGS = ("-std=c++17", "-O3", "-lineinfo")
DEVICE_LAUNCH_FLAGS = ("-rdc=true", "-dlink")  # links the device runtime, libcudadevrt.a
DEVICE_LAUNCH = "device_launch.cu"
SOURCES = (
    "chain.cu",
    "fused.cu",
    DEVICE_LAUNCH,
    "persistent.cu",
    "cooperative.cu",
    "work_queue.cu",
    "gemm.cu",
    "drain_queue.cu",
    "resident.cu",
)


def load_rung(number: int) -> ModuleType:
    """The program of rung `number` as a module; each is loaded once."""
    (path,) = RUNGS.glob(f"{number:02}_*.py")
    name = f"distmk_launch_lab_{number:02}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise BuildError(f"{path} cannot be loaded; reinstall distmk")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def architecture_for(capability: tuple[int, int]) -> str:
    """The architecture to compile for. UsageError: the compute capability is below 8.0.

    The lab also runs on GPUs from 8.0 on that distmk does not support.
    """
    try:
        return architecture_of(capability)
    except UsageError:
        major, minor = capability
        if capability < (8, 0):
            raise UsageError(
                f"the launch lab needs compute capability 8.0 or newer; this GPU has {major}.{minor}"
            ) from None
        return f"sm_{major}{minor}"


def build(source: str, architecture: str) -> Path:
    """Path of the cubin of `source`, a file of the rungs, compiled unless it is cached. BuildError: it does not compile."""
    nvcc, version = find_nvcc()
    path = RUNGS / source
    flags = FLAGS + DEVICE_LAUNCH_FLAGS if source == DEVICE_LAUNCH else FLAGS

    def make(scratch: Path) -> Path:
        cubin = scratch / f"{path.stem}.cubin"
        code = f"arch={architecture.replace('sm_', 'compute_')},code={architecture}"
        run([nvcc, *flags, "-gencode", code, "-cubin", path, "-o", cubin], scratch)
        return cubin

    included = [RUNGS / name for name in ("lab.cuh", "chain.cu")]
    key = content_key([version, architecture, *flags], {path, *included})
    return cached(f"lab-{path.stem}-{architecture}", ".cubin", key, make)
