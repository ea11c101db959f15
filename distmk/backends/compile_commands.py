"""`compile_commands.json`: how each file of csrc is compiled, for clangd and other tools that read C++."""

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

ARCHITECTURE = "sm_90a"  # the editor shows code for this architecture; others leave out parts of it

# Headers that replace headers which clang cannot read. The first one is empty: clang includes it in all CUDA code, but
# nvcc's package lacks it. The others declare the functions of NVSHMEM that the kernel calls.
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

# clang's flags for some flags of nvcc; None: no flag is needed. All other flags have the same name.
CLANG_FLAGS = {
    "-rdc=true": "-fgpu-rdc",
    "-ftz=true": "-fgpu-flush-denormals-to-zero",
    "--expt-relaxed-constexpr": None,  # clang always allows it
    "-lineinfo": "-gline-tables-only",
    "-cubin": "--offload-device-only",
}


def checkout() -> Path:
    """The root of this checkout. UsageError: the package is installed without one."""
    root = csrc_dir().parent
    if not (root / "pyproject.toml").exists():
        raise UsageError("compile_commands.json belongs to a checkout of the repository; run this command in one")
    return root


def write_compile_commands(root: Path) -> Path:
    """Write the file to `root` and return its path. Generated sources go to build/generated there.

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
    """The entry for one file, which is the last word of `command`."""
    words = [str(word) for word in command]
    return {"directory": str(root), "file": words[-1], "arguments": words}


def host_commands(generated: Path) -> Iterator[list[str]]:
    """Commands for the host twin and the emulator. `generated`: the folder of the emulator's generated header."""
    tools = sorted((csrc_dir() / "tools").glob("*.cpp"))
    for flags, sources in (
        (list(host.FLAGS), host.host_sources()),
        (host.emulator_flags(), [*host.emulator_sources(), *tools]),
    ):
        for source in sources:
            yield host.compile_command(env.compiler(), flags, source, generated)


def device_commands(generated: Path) -> Iterator[list[str]]:
    """Commands for the kernel's one source, for each of its headers, which can be read alone, and for the tools for GPUs."""
    toolchain = find_toolchain()
    home = cuda_home(toolchain.nvcc)
    headers = sorted((csrc_dir() / "device").rglob("*.cuh"))
    for source in (generated / "kernel.cu", *headers):
        yield as_clang(kernel.compile_command(toolchain, ARCHITECTURE, source, includes=[generated]), home)
    yield as_clang(probe.compile_command(toolchain.nvcc, ARCHITECTURE, [generated]), home)


def as_clang(command: Sequence[str | Path], home: Path) -> list[str]:
    """The clang command for a command of nvcc. `home`: the folder of CUDA."""
    # Without the device library, which is needed only for linking.
    clang = ["clang++", "-x", "cuda", f"--cuda-path={home}", "-nogpulib"]
    words = iter([str(word) for word in command[1:]])
    for word in words:
        if word == "-Xptxas":
            next(words)
        elif word == "-gencode":
            clang.append(f"--offload-arch={next(words).rpartition('=')[2]}")
        elif flag := CLANG_FLAGS.get(word, word):
            clang.append(flag)
    return clang
