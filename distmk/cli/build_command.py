"""`distmk build`: compile the GPU kernel before its first use, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distmk.backends.compile_commands import checkout, write_compile_commands
from distmk.backends.cuda.build import ARCHITECTURES, Report, build_cubin, built_cubin, copy_cubin
from distmk.console import show
from distmk.tasks.own_types import import_package


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="compile the GPU kernel ahead of its first use",
        description="Compile the GPU kernel into the cache, on a machine with or without a GPU. Needs nvcc and NVSHMEM, "
        "such as those of pip install 'distmk[build]'. Without --arch, list the architectures and their kernels.",
    )
    parser.add_argument("--list", action="store_true", help="list the architectures and the kernels that are there")
    parser.add_argument(
        "--arch",
        action="append",
        choices=(*ARCHITECTURES, "all"),
        metavar="ARCH",
        help=f"architecture to compile for, once or several times: {', '.join(ARCHITECTURES)}, or all",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="put a copy there too; elsewhere, DISTMK_CUBIN_DIR=DIR uses it without nvcc",
    )
    parser.add_argument(
        "--compile-commands",
        action="store_true",
        help="write compile_commands.json to the root of this checkout, for clangd, and compile nothing",
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="packages",
        metavar="PACKAGE",
        help="add the task types that this Python package registers: the kernel for programs with its tasks",
    )
    parser.add_argument(
        "--packed", action="store_true", help="the kernel for models whose weights stay packed: FP8 and 4-bit integers"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compile_commands:
        show(f"{write_compile_commands(checkout())}")
        return 0
    own_types = sorted({name for package in arguments.packages for name in import_package(package)})
    if arguments.list or not arguments.arch:
        for architecture in ARCHITECTURES.values():
            built = built_cubin(architecture.name, own_types, arguments.packed)
            show(f"{architecture.name:<8} {architecture.gpus:<18} {describe(built) if built else 'not compiled yet'}")
        return 0
    wanted = list(ARCHITECTURES if "all" in arguments.arch else dict.fromkeys(arguments.arch))
    with ThreadPoolExecutor(len(wanted)) as pool:
        cubins = pool.map(lambda architecture: build_cubin(architecture, own_types, arguments.packed), wanted)
        for architecture, cubin in zip(wanted, cubins, strict=True):
            path = copy_cubin(cubin, arguments.output) if arguments.output else cubin
            show(f"{architecture:<8} {describe(path)}")
    return 0


def describe(cubin: Path) -> str:
    """Path, size and compiler report of a kernel."""
    text = f"{cubin}, {cubin.stat().st_size / 1e6:.2f} MB"
    if report := Report.of(cubin):
        text += (
            f", {report.registers} registers, {report.spill_bytes} bytes spilled, "
            f"{report.shared_bytes} bytes of static shared memory, compiled in {report.compile_s:g} s "
            f"by nvcc {report.nvcc} with NVSHMEM {report.nvshmem}"
        )
    return text
