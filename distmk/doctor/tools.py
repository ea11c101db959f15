"""Checks of the cuda backend's packages, settings, toolchain and kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence

from distmk.backends.cuda.build import ARCHITECTURES, architecture_of, built_cubin
from distmk.backends.cuda.packages import CUDA_PACKAGES, INSTALL_CUDA, MULTICAST_OFF
from distmk.backends.cuda.toolchain import find_nvcc, find_nvshmem, find_toolchain, nvshmem_version
from distmk.doctor.finding import Finding, first_line
from distmk.errors import BuildError, UsageError


def check_packages() -> Finding:
    """Packages that the cuda backend imports, except torch, which `gpus.check_driver` checks."""
    present, absent = [], []
    for module, package in CUDA_PACKAGES.items():
        if module == "torch":
            continue
        try:
            importlib.import_module(module)
            present.append(f"{package} {_version(package)}")
        except Exception as error:  # without a driver some packages raise more than ImportError
            absent.append(f"{package} ({first_line(str(error), type(error).__name__)})")
    if absent:
        text = f"cannot be loaded: {', '.join(absent)}; {INSTALL_CUDA}"
        return Finding("cuda packages", "missing", text, "cuda")
    return Finding("cuda packages", "ok", ", ".join(present))


def check_nvshmem() -> Finding:
    """NVSHMEM's headers and device library; needed only to compile."""
    try:
        root = find_nvshmem()
    except BuildError as error:
        return Finding("nvshmem", "missing", str(error))
    return Finding("nvshmem", "ok", f"{nvshmem_version(root)} at {root}")


def check_nvcc() -> Finding:
    """nvcc; needed only to compile."""
    try:
        nvcc, version = find_nvcc()
    except BuildError as error:
        return Finding("nvcc", "missing", str(error))
    return Finding("nvcc", "ok", f"{version} at {nvcc}")


def check_multicast() -> Finding:
    """Environment variables that would turn on NVLink multicast."""
    for name, off in MULTICAST_OFF.items():
        if (value := os.environ.get(name, off)) != off:
            return Finding(
                "multicast", "warn", f"{name}={value} asks for NVLink multicast, which distmk never needs: unset it"
            )
    return Finding("multicast", "ok", "off: distmk sets NVSHMEM_DISABLE_NVLS=1 itself")


def check_kernel(capabilities: Sequence[tuple[int, int]]) -> Finding:
    """Whether there is a kernel for GPUs of these compute capabilities, or it can be compiled."""
    if not capabilities:
        there = [name for name in ARCHITECTURES if built_cubin(name)]
        return Finding("kernel", "ok", f"compiled for {', '.join(there) or 'no architecture'}")
    lines = []
    for capability in capabilities:
        try:
            name = architecture_of(capability)
            if cubin := built_cubin(name):
                lines.append(f"{name}: {cubin}")
                continue
            find_toolchain()
        except UsageError as error:
            return Finding("kernel", "missing", str(error), "cuda")
        lines.append(f"{name}: compiled at first use; distmk build --arch {name} does it now")
    return Finding("kernel", "ok", "; ".join(lines))


CHECKS: dict[str, Callable[[], Finding]] = {
    "cuda packages": check_packages,
    "multicast": check_multicast,
    "nvshmem": check_nvshmem,
    "nvcc": check_nvcc,
}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
