"""Compile csrc for a GPU architecture with nvcc and link NVSHMEM's device library. Needs no GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import cached, content_key, csrc_dir
from distmk.backends.cache_files import fault_of, folder_fault, publish, read_text
from distmk.backends.cuda.toolchain import Toolchain, find_toolchain, run
from distmk.backends.kernel_sources import PACKED_FLAG, kernel_sources, translation_unit
from distmk.backends.own_sources import OwnSources, own_sources
from distmk.console import tell
from distmk.errors import BuildError, UsageError
from distmk.tasks.own_types import packages_of

FLAGS = ("-std=c++17", "-O3", "-ftz=true", "-rdc=true", "--expt-relaxed-constexpr", "-lineinfo")
KERNEL = "distmk_megakernel"

# Kernels of a wheel that was built with them (`distmk.packaging`). They are trusted as the package's own code is, so that their
# owner and mode do not matter.
PACKAGED = Path(__file__).parents[2] / "gpu-kernels"


@dataclass(frozen=True)
class Architecture:
    """A compilation target: the GPUs of one compute capability. Other GPUs of the same generation have less shared memory."""

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
    """The compiler's report on a kernel; saved beside it as JSON."""

    architecture: str
    source: str  # `source_key` of its sources and flags
    nvcc: str
    nvshmem: str
    registers: int  # registers of a thread
    spill_bytes: int  # bytes that a thread stores to local memory
    shared_bytes: int  # static shared memory of a block; dynamic shared memory is set at launch
    compile_s: float
    serialized_functions: int = 0  # functions in which tensor-core products wait for each other

    @staticmethod
    def of(cubin: Path) -> Report | None:
        """The report beside the kernel at `cubin`, if there is one."""
        try:
            text = read_text(cubin.with_suffix(".json"), own=cubin.parent != PACKAGED)
            return Report(**json.loads(text or ""))
        except (ValueError, TypeError):
            return None


def architecture_of(capability: tuple[int, int]) -> str:
    """The name of the architecture to compile for. UsageError: the kernel does not run on GPUs of this compute capability."""
    for each in ARCHITECTURES.values():
        if each.capability == tuple(capability):
            return each.name
    known = ", ".join(
        f"{major}.{minor} ({each.gpus})" for each in ARCHITECTURES.values() for major, minor in [each.capability]
    )
    version = ".".join(map(str, capability))
    raise UsageError(f"the cuda backend does not run on a GPU of compute capability {version}; it runs on {known}")


def build_cubin(architecture: str, own_types: Sequence[str] = (), packed: bool = False) -> Path:
    """The path of the kernel for `architecture` with these registered task types.

    packed: the kernel of programs with packed weights.

    The kernel is taken from DISTMK_CUBIN_DIR, else from the package, else from the cache, else compiled into the cache.
    Without a toolchain, a cached kernel that other tools made from the same sources is good enough.

    BuildError: the architecture is not supported, nvcc or NVSHMEM is needed and missing, or the sources do not compile.
    """
    if architecture not in ARCHITECTURES:
        raise BuildError(f"architecture {architecture} is not supported; choose one of {', '.join(ARCHITECTURES)}")
    given, own = env.cubin_dir(), own_sources(own_types, "device")
    refused: list[str] = []
    for folder in filter(None, (given, PACKAGED)):
        if cubin := find_cubin(architecture, folder, refused, own, packed):
            return cubin
    try:
        toolchain = find_toolchain()
    except BuildError as error:
        if cubin := find_cubin(architecture, env.cache_dir(), refused, own, packed):
            return cubin
        options = "".join([*(f" --with {package}" for package in packages_of(own_types)), " --packed" * packed])
        advice = f"or run distmk build --arch {architecture}{options} --output DIR elsewhere and set DISTMK_CUBIN_DIR"
        none = refused[0] if refused else f"no kernel for {architecture} of this version in {given or env.cache_dir()}"
        raise BuildError(f"{none}, and {error}; {advice}") from None
    if refused:
        tell(f"{refused[0]}; the kernel of the cache is used instead", "warning")
    key = content_key(toolchain.content(), [])
    return cached(
        _name(architecture, own, packed),
        ".cubin",
        key,
        lambda scratch: compile_cubin(toolchain, architecture, scratch, own=own, packed=packed),
        f"the kernel for {architecture}{' and packed weights' * packed}{' with ' if own else ''}{', '.join(own_types)}",
        usually="1 to 3 minutes",
    )


def find_cubin(
    architecture: str,
    folder: Path,
    refused: list[str] | None = None,
    own: OwnSources | None = None,
    packed: bool = False,
) -> Path | None:
    """The newest kernel in `folder` made from these sources for `architecture`, with any tools.

    `refused` collects what is wrong with the folder, and with kernels that may not be loaded (`cache_files`).
    """
    refused = [] if refused is None else refused
    is_packaged = folder == PACKAGED
    if not is_packaged and (fault := folder_fault(folder)):
        refused.append(f"{folder} {fault}")
        return None
    for path in sorted(folder.glob(f"{_name(architecture, own, packed)}-*.cubin"), key=_age):
        if fault := fault_of(path, own=not is_packaged):
            refused.append(f"{path} {fault}")
        else:
            return path
    return None


def _age(path: Path) -> float:
    return -path.lstat().st_mtime if os.path.lexists(path) else 0.0


def built_cubin(architecture: str, own_types: Sequence[str] = (), packed: bool = False) -> Path | None:
    """The kernel for `architecture` with these types in DISTMK_CUBIN_DIR, the package or the cache, if there is one."""
    folders, own = (env.cubin_dir(), PACKAGED, env.cache_dir()), own_sources(own_types, "device")
    return next(
        (
            cubin
            for folder in filter(None, folders)
            if (cubin := find_cubin(architecture, folder, own=own, packed=packed))
        ),
        None,
    )


def copy_cubin(cubin: Path, folder: Path) -> Path:
    """Copy a kernel, its report and its digest to `folder`, for DISTMK_CUBIN_DIR. BuildError: the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
            for path in (cubin, cubin.with_suffix(".json")):
                if path.exists():
                    shutil.copyfile(path, Path(scratch) / path.name)
            publish(Path(scratch) / cubin.name, folder / cubin.name)
    except OSError as error:
        raise BuildError(f"cannot write {folder / cubin.name}: {error.strerror or error}") from None
    if (fault := folder_fault(folder)) is not None:
        tell(f"{folder} {fault}; change that before DISTMK_CUBIN_DIR names it", "warning")
    return folder / cubin.name


def source_key(architecture: str, own: OwnSources | None = None, packed: bool = False) -> str:
    """A hash of all sources and flags. The tools are not part of it."""
    flags = [*FLAGS, *env.nvcc_flags(), *[PACKED_FLAG] * packed]
    ingredients = [architecture, *flags, translation_unit(own), *(own.key if own else ())]
    return content_key(ingredients, kernel_sources())


def compile_command(
    toolchain: Toolchain, architecture: str, source: Path, virtual: str | None = None, includes: Sequence[Path] = ()
) -> list[str | Path]:
    """The command that compiles `source`, without the name of its output.

    `virtual`: see `compile_cubin`. `includes`: folders of generated headers, searched before csrc.
    """
    code = f"arch={virtual or architecture.replace('sm_', 'compute_')},code={architecture}"
    folders = [f"-I{folder}" for folder in (*includes, csrc_dir(), toolchain.nvshmem / "include")]
    return [toolchain.nvcc, *FLAGS, *env.nvcc_flags(), "-Xptxas", "-v", "-gencode", code, "-cubin", *folders, source]


def compile_cubin(
    toolchain: Toolchain,
    architecture: str,
    folder: Path,
    virtual: str | None = None,
    own: OwnSources | None = None,
    packed: bool = False,
) -> Path:
    """Compile and link in `folder`. Returns the path of the kernel, which has its report beside it.

    `virtual` (such as compute_80): the architecture that the sources see, by default that of `architecture`. This makes
    it possible to test the code for an older GPU on a newer one.
    """
    began = time.perf_counter()
    source, obj, cubin = folder / "distmk.cu", folder / "distmk.o.cubin", folder / "distmk.cubin"
    source.write_text(translation_unit(own))
    if own:
        own.write(folder)
    command = compile_command(toolchain, architecture, source, virtual, [folder] if own else [])
    output = run([*command, *[PACKED_FLAG] * packed, "-o", obj], folder, own.bodies if own else ())
    library = [f"-L{toolchain.nvshmem / 'lib'}", "-lnvshmem_device"]
    output += run([toolchain.nvlink, "-v", f"--arch={architecture}", obj, *library, "-o", cubin], folder)
    report = Report(
        architecture=architecture,
        source=source_key(architecture, own, packed),
        nvcc=toolchain.nvcc_version,
        nvshmem=toolchain.nvshmem_version,
        registers=_number(rf"nvlink.*{KERNEL}.*\n.*used (\d+) registers", output),
        spill_bytes=_number(rf"ptxas.*properties for {KERNEL}\n.*?(\d+) bytes spill stores", output),
        shared_bytes=_number(rf"nvlink.*{KERNEL}.*\n.* (\d+) bytes smem", output),
        compile_s=round(time.perf_counter() - began, 1),
        serialized_functions=len(re.findall(r"\(C75\d\d\).*wgmma.*serialized", output)),
    )
    cubin.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return cubin


def _name(architecture: str, own: OwnSources | None, packed: bool) -> str:
    return f"cuda-{architecture}-{source_key(architecture, own, packed)}"


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
