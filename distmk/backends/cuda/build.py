"""Compile csrc for a GPU architecture with nvcc and link NVSHMEM's device library; no GPU is needed for it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import cached, content_key, csrc_dir
from distmk.backends.cuda.toolchain import Toolchain, find_toolchain, run
from distmk.backends.kernel_sources import kernel_sources, translation_unit
from distmk.errors import BuildError, UsageError

FLAGS = ("-std=c++17", "-O3", "-ftz=true", "-rdc=true", "--expt-relaxed-constexpr", "-lineinfo")
KERNEL = "distmk_megakernel"


@dataclass(frozen=True)
class Architecture:
    """What the GPUs of one compute capability are compiled for. Others of the same generation have less shared memory."""

    name: str
    capability: tuple[int, int]
    gpus: str


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("sm_80", (8, 0), "A100, A30"),
        Architecture("sm_90a", (9, 0), "H100, H200, GH200"),
        Architecture("sm_100a", (10, 0), "B200, GB200"),
        Architecture("sm_103a", (10, 3), "B300, GB300"),
    )
}


@dataclass(frozen=True)
class Report:
    """What is known of a kernel since it was compiled; lies beside it as JSON."""

    architecture: str
    source: str  # hash of sources and flags
    nvcc: str
    nvshmem: str
    registers: int  # of a thread
    spill_bytes: int  # of a thread, written to local memory
    shared_bytes: int  # static; the rest is asked for at launch
    compile_s: float

    @staticmethod
    def of(cubin: Path) -> Report | None:
        """That of a kernel, if it has one."""
        try:
            return Report(**json.loads(cubin.with_suffix(".json").read_text()))
        except (OSError, ValueError, TypeError):
            return None


def architecture_of(capability: tuple[int, int]) -> str:
    """What to compile for on a GPU of this compute capability; UsageError where the kernel cannot run on it."""
    for each in ARCHITECTURES.values():
        if each.capability == tuple(capability):
            return each.name
    known = ", ".join(
        f"{major}.{minor} ({each.gpus})" for each in ARCHITECTURES.values() for major, minor in [each.capability]
    )
    found = ".".join(map(str, capability))
    raise UsageError(f"the cuda backend does not run on a GPU of compute capability {found}; it runs on {known}")


def build_cubin(architecture: str) -> Path:
    """Path of the kernel for `architecture`: from DISTMK_CUBIN_DIR, else the cache, else compiled into it.

    Where nothing can be compiled, one of the cache will do that other tools made of the same sources. BuildError: an
    architecture that is not supported, no nvcc or no NVSHMEM where they are needed, or sources that do not compile.
    """
    if architecture not in ARCHITECTURES:
        raise BuildError(f"architecture {architecture} is not supported; choose one of {', '.join(ARCHITECTURES)}")
    given = env.cubin_dir()
    if given and (found := find_cubin(architecture, given)):
        return found
    try:
        toolchain = find_toolchain()
    except BuildError as error:
        if found := find_cubin(architecture, env.cache_dir()):
            return found
        advice = f"or run distmk build --arch {architecture} --output DIR elsewhere and set DISTMK_CUBIN_DIR"
        raise BuildError(
            f"no kernel for {architecture} of this version in {given or env.cache_dir()}, and {error}; {advice}"
        ) from None
    key = content_key(toolchain.content(), [])
    return cached(_name(architecture), ".cubin", key, lambda scratch: compile_cubin(toolchain, architecture, scratch))


def find_cubin(architecture: str, folder: Path) -> Path | None:
    """The newest kernel in `folder` that was made of these sources for `architecture`, by whatever tools."""
    found = folder.glob(f"{_name(architecture)}-*.cubin")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def built_cubin(architecture: str) -> Path | None:
    """The kernel that is there without compiling, of DISTMK_CUBIN_DIR or the cache."""
    folders = [folder for folder in (env.cubin_dir(), env.cache_dir()) if folder]
    return next((found for folder in folders if (found := find_cubin(architecture, folder))), None)


def copy_cubin(cubin: Path, folder: Path) -> Path:
    """Put a kernel and its report into `folder`, for DISTMK_CUBIN_DIR. BuildError: it cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (cubin.with_suffix(".json"), cubin):
            partial = folder / f".{path.name}.{os.getpid()}"
            if path.exists():
                shutil.copyfile(path, partial)
                os.replace(partial, folder / path.name)
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder / cubin.name


def source_key(architecture: str) -> str:
    """Hash of all that is compiled, and how; not of the tools."""
    return content_key([architecture, *FLAGS, *env.nvcc_flags(), translation_unit()], kernel_sources())


def compile_cubin(toolchain: Toolchain, architecture: str, folder: Path, virtual: str | None = None) -> Path:
    """Compile and link in `folder`; the kernel, with its report beside it.

    `virtual` (such as compute_80) is the compute capability that the sources see, by default that of `architecture`: an
    older one's code can be tried on a newer GPU.
    """
    began = time.perf_counter()
    source, obj, cubin = folder / "distmk.cu", folder / "distmk.o.cubin", folder / "distmk.cubin"
    source.write_text(translation_unit())
    code = f"arch={virtual or architecture.replace('sm_', 'compute_')},code={architecture}"
    includes = [f"-I{csrc_dir()}", f"-I{toolchain.nvshmem / 'include'}"]
    flags = [*FLAGS, *env.nvcc_flags(), "-Xptxas", "-v", "-gencode", code, "-cubin", *includes]
    said = run([toolchain.nvcc, *flags, source, "-o", obj])
    library = [f"-L{toolchain.nvshmem / 'lib'}", "-lnvshmem_device"]
    said += run([toolchain.nvlink, "-v", f"--arch={architecture}", obj, *library, "-o", cubin])
    report = Report(
        architecture=architecture,
        source=source_key(architecture),
        nvcc=toolchain.nvcc_version,
        nvshmem=toolchain.nvshmem_version,
        registers=_number(rf"nvlink.*{KERNEL}.*\n.*used (\d+) registers", said),
        spill_bytes=_number(rf"ptxas.*properties for {KERNEL}\n.*?(\d+) bytes spill stores", said),
        shared_bytes=_number(rf"nvlink.*{KERNEL}.*\n.* (\d+) bytes smem", said),
        compile_s=round(time.perf_counter() - began, 1),
    )
    cubin.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return cubin


def _name(architecture: str) -> str:
    return f"cuda-{architecture}-{source_key(architecture)}"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
