"""`compile_commands.json`: how each file of csrc is compiled, as clangd and other tools that read C++ want to know it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import csrc_dir
from distmk.backends.cuda import build as kernel
from distmk.backends.cuda import probe
from distmk.backends.cuda.toolchain import cuda_home, find_toolchain
from distmk.backends.host import build as host
from distmk.backends.kernel_sources import translation_unit
from distmk.errors import UsageError

ARCHITECTURE = "sm_90a"  # whose code the editor shows; others leave out parts of it

# Headers that stand in for those that clang cannot read: an empty one that it includes in all CUDA code, though nvcc's package
# lacks it, and NVSHMEM's, of which the kernel calls this.
STAND_INS = {
    "curand_mtgp32_kernel.h": "",
    "nvshmemx.h": "",
    "nvshmem.h": """#pragma once
#include <cstddef>
#include <cstdint>

enum { NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD };
__device__ void nvshmem_putmem_nbi(void* dst, const void* src, size_t num_bytes, int rank);
__device__ void nvshmem_fence();
__device__ void nvshmem_quiet();
__device__ void nvshmemx_signal_op(uint64_t* word, uint64_t value, int how, int rank);
""",
}

# What clang has for flags of nvcc; None: nothing. All others have the same name.
CLANG_FLAGS = {
    "-rdc=true": "-fgpu-rdc",
    "-ftz=true": "-fgpu-flush-denormals-to-zero",
    "--expt-relaxed-constexpr": None,  # clang always allows it
    "-lineinfo": "-gline-tables-only",
    "-cubin": "--offload-device-only",
}


def checkout() -> Path:
    """The root of this checkout. UsageError: the package is installed, and there is none."""
    root = csrc_dir().parent
    if not (root / "pyproject.toml").exists():
        raise UsageError("compile_commands.json belongs to a checkout of the repository; run this command in one")
    return root


def write_compile_commands(root: Path) -> Path:
    """Write the file to `root`; returns its path. The sources that a build generates go to build/generated there.

    BuildError: nvcc or NVSHMEM is missing.
    """
    generated = root / "build" / "generated"
    commands = [*host_commands(generated), *device_commands(generated)]
    generated.mkdir(parents=True, exist_ok=True)
    for name, text in {host.EMULATED_KERNEL: translation_unit(), "kernel.cu": translation_unit(), **STAND_INS}.items():
        (generated / name).write_text(text)
    path = root / "compile_commands.json"
    path.write_text(json.dumps([entry(root, command) for command in commands], indent=1) + "\n")
    return path


def entry(root: Path, command: Sequence[str | Path]) -> dict[str, str | list[str]]:
    """How a file, the last word of `command`, is compiled."""
    words = [str(word) for word in command]
    return {"directory": str(root), "file": words[-1], "arguments": words}


def host_commands(generated: Path) -> Iterator[list[str]]:
    """Of the host twin and the emulator. `generated`: the folder of the emulator's generated header."""
    tools = sorted((csrc_dir() / "tools").glob("*.cpp"))
    for flags, sources in (
        (list(host.FLAGS), host.host_sources()),
        (host.emulator_flags(), [*host.emulator_sources(), *tools]),
    ):
        for source in sources:
            yield host.compile_command(env.compiler(), flags, source, generated)


def device_commands(generated: Path) -> Iterator[list[str]]:
    """Of the kernel's one source, and of each of its headers, which can be read alone; and of the tools for GPUs."""
    toolchain = find_toolchain()
    home = cuda_home(toolchain.nvcc)
    headers = sorted((csrc_dir() / "device").rglob("*.cuh"))
    for source in (generated / "kernel.cu", *headers):
        yield as_clang(kernel.compile_command(toolchain, ARCHITECTURE, source, includes=[generated]), home)
    yield as_clang(probe.compile_command(toolchain.nvcc, ARCHITECTURE, [generated]), home)


def as_clang(command: Sequence[str | Path], home: Path) -> list[str]:
    """The command of clang for one of nvcc. `home`: the folder of CUDA."""
    # Without a device library, which is for linking.
    found = ["clang++", "-x", "cuda", f"--cuda-path={home}", "-nogpulib"]
    words = iter([str(word) for word in command[1:]])
    for word in words:
        if word == "-Xptxas":
            next(words)
        elif word == "-gencode":
            found.append(f"--offload-arch={next(words).rpartition('=')[2]}")
        elif flag := CLANG_FLAGS.get(word, word):
            found.append(flag)
    return found
