"""Checks of the GPUs, their driver, and the links between them. Reads attributes and sets none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distmk import env
from distmk.backends.cuda.build import architecture_of
from distmk.backends.cuda.driver import checked
from distmk.backends.cuda.gpus import runs_mps
from distmk.backends.cuda.packages import INSTALL_CUDA
from distmk.backends.defaults import why_no_cuda
from distmk.doctor.finding import Finding
from distmk.errors import UsageError

MIN_FREE_BYTES = 2e9  # below this, a warning is due
NEEDED_CUDA = 13


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU. `peers`: the link to every GPU, itself included: ITSELF, NVLINK, PCIE or NONE."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int
    cooperative: bool  # supports cooperative launches, whose blocks are all resident at once
    peers: tuple[str, ...]


ITSELF, NVLINK, PCIE, NONE = ".", "NV", "P", "-"


def read_gpus() -> list[Gpu]:
    """The GPUs that are visible to this process, according to the driver; nothing is allocated. UsageError: there are none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(why_no_cuda() or f"cannot ask the driver: {error}; {INSTALL_CUDA}") from None
    try:
        checked(driver.cuInit(0))
        count = checked(driver.cuDeviceGetCount())
    except RuntimeError as error:  # raised by the driver, or by cuda-python without a driver
        raise UsageError(f"no NVIDIA GPU or no driver on this machine ({error}); the host twin needs none") from None
    if not count:
        raise UsageError("the driver shows no GPU; look at CUDA_VISIBLE_DEVICES")
    return [_read_gpu(driver, index, count) for index in range(count)]


def _read_gpu(driver: Any, index: int, count: int) -> Gpu:
    device = checked(driver.cuDeviceGet(index))

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver.cuDeviceGetAttribute(kind, device)))

    return Gpu(
        index=index,
        name=checked(driver.cuDeviceGetName(100, device)).split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        memory_bytes=int(checked(driver.cuDeviceTotalMem(device))),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
        peers=tuple(_link(driver, device, index, other) for other in range(count)),
    )


def _link(driver: Any, device: Any, index: int, other: int) -> str:
    """The link from a GPU to another. Signals between GPUs are atomic adds, which only NVLink supports."""
    if other == index:
        return ITSELF
    peer = checked(driver.cuDeviceGet(other))
    if not checked(driver.cuDeviceCanAccessPeer(device, peer)):
        return NONE
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return NVLINK if checked(driver.cuDeviceGetP2PAttribute(atomics, device, peer)) else PCIE


def check_gpus(gpus: Sequence[Gpu], why_none: str = "") -> Finding:
    """Checks compute capability and cooperative launch of every GPU, and says how many ranks may share one."""
    if not gpus:
        return Finding("gpus", "missing", why_none, "cuda")
    lines, faults = [], []
    for gpu in gpus:
        major, minor = gpu.capability
        lines.append(
            f"{gpu.index}: {gpu.name}, compute capability {major}.{minor}, {gpu.memory_bytes / 1e9:.0f} GB, "
            f"{gpu.num_sms} SMs, cooperative launch {'yes' if gpu.cooperative else 'no'}"
        )
        try:
            architecture_of(gpu.capability)
        except UsageError as error:
            faults.append(f"GPU {gpu.index}: {error}")
    if faults:
        text = f"{faults[0]}; hide it with CUDA_VISIBLE_DEVICES, or use --backend host"
        return Finding("gpus", "missing", text, "cuda", tuple(lines))
    if without := [gpu.index for gpu in gpus if not gpu.cooperative]:
        text = f"GPU {without[0]} has no cooperative launch: every iteration is a launch of its own, which is slower"
        return Finding("gpus", "warn", f"{text}; choose others by CUDA_VISIBLE_DEVICES", "cuda", tuple(lines))
    most = env.ranks_per_gpu()
    each = "a rank each" if most == 1 else f"up to {most} ranks each, {_sharing(gpus)}"
    return Finding("gpus", "ok", f"{len(gpus)}, {each}", details=tuple(lines))


def _sharing(gpus: Sequence[Gpu]) -> str:
    if all(runs_mps(gpu.index) for gpu in gpus):
        return "side by side by MPS"
    return "in time slices of milliseconds; side by side once `nvidia-cuda-mps-control -d` has started MPS"


def check_driver(gpus: Sequence[Gpu]) -> Finding:
    """The CUDA versions of torch and of the driver."""
    try:
        import torch
    except ImportError:
        return Finding("torch", "missing", f"torch is not installed; {INSTALL_CUDA}", "cuda")
    text = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        advice = "install one for CUDA 13, see https://pytorch.org/get-started"
        return Finding("torch", "missing", f"{text} is a build without CUDA; {advice}", "cuda")
    text += f" for CUDA {torch.version.cuda}"
    if not gpus:
        return Finding("torch", "missing", f"{text}, no driver", "cuda")
    from cuda.bindings import driver

    version = int(checked(driver.cuDriverGetVersion()))
    text += f", driver for CUDA {version // 1000}.{version % 1000 // 10}"
    if version < 1000 * NEEDED_CUDA:
        return Finding("torch", "missing", f"{text}; update the driver to one for CUDA 13", "cuda")
    return Finding("torch", "ok", text)


def check_peers(gpus: Sequence[Gpu]) -> Finding:
    """Whether ranks on this machine can signal one another over NVLink."""
    if len(gpus) < 2:
        return Finding("peers", "ok", f"{len(gpus)} GPUs here: nothing to reach")
    links = {link for gpu in gpus for link in gpu.peers}
    head = "    " + "".join(f"{gpu.index:>4}" for gpu in gpus)
    matrix = (head, *(f"{gpu.index:>4}" + "".join(f"{link:>4}" for link in gpu.peers) for gpu in gpus))
    if links <= {ITSELF, NVLINK}:
        return Finding("peers", "ok", f"all {len(gpus)} GPUs reach one another over NVLink", details=matrix)
    text = f"not all GPUs reach one another over NVLink ({NVLINK}: NVLink, {PCIE}: PCIe without atomics, {NONE}: not at all)"
    return Finding("peers", "warn", f"{text}; run ranks on GPUs that do, by CUDA_VISIBLE_DEVICES", details=matrix)


def check_memory(gpus: Sequence[Gpu]) -> Finding:
    """Free memory, for weights, KV cache and the symmetric heap."""
    notes = []
    if given := os.environ.get("NVSHMEM_SYMMETRIC_SIZE"):
        notes.append(f"NVSHMEM_SYMMETRIC_SIZE={given} has no effect, distmk sets it for each program: unset it")
    if not gpus:
        return Finding("gpu memory", "warn" if notes else "ok", "; ".join([*notes, "no GPU here"]))
    import torch

    free = [torch.cuda.mem_get_info(gpu.index)[0] for gpu in gpus]
    text = "free: " + ", ".join(f"{each / 1e9:.1f} GB" for each in free)
    if min(free) < MIN_FREE_BYTES:
        notes.append("end what else runs on the GPU, or choose others by CUDA_VISIBLE_DEVICES")
    return Finding("gpu memory", "warn" if notes else "ok", "; ".join([text, *notes]))


CHECKS: dict[str, Callable[[Sequence[Gpu]], Finding]] = {
    "torch": check_driver,
    "peers": check_peers,
    "gpu memory": check_memory,
}
