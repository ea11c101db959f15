"""The hardware and the versions of a benchmark run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from distmk.backends.cuda.toolchain import find_nvshmem, nvshmem_version
from distmk.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "launch_lab"))

from lab.gpu import pci_bus_id  # noqa: E402
from lab.power import Meter  # noqa: E402

# NVLink multicast is never needed, and can put a host's GPUs out of service for its other users.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python, this repository, and those of `packages` that are installed."""
    installed = {"python": platform.python_version(), "commit": commit()}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """The repository's commit, followed by a + if files have been changed since; `unknown` outside of a repository."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return head + "+" * bool(changed) if head else "unknown"


def cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": name or platform.processor(), "cores": len(os.sched_getaffinity(0))}


def gpu(device_id: int) -> dict[str, str]:
    """The GPU, its driver, and the versions of CUDA's parts."""
    import torch

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    try:
        nvshmem = nvshmem_version(find_nvshmem())
    except BuildError:
        nvshmem = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(device_id),
        "driver": driver[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        "nvshmem": nvshmem,
    }


def power_meter(backend: str, device_id: int) -> Meter:
    """A power meter of a GPU; on the host twin, a meter that measures nothing."""
    return Meter(pci_bus_id(device_id) if backend == "cuda" else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
