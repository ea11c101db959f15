"""`distmk doctor` on this machine without its GPUs, and on machines of fake drivers and a fake torch."""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.helpers import Finished, Runner

import distmk.doctor
from distmk.backends.cache_files import publish
from distmk.backends.cuda import build
from distmk.backends.defaults import NO_GPU, why_no_cuda
from distmk.doctor import Finding, examine, host, is_fit, tools
from distmk.engine.session import Session

NAMES = ["python", "compiler", "host twin", "cores", "shared memory", "mpi", "network", "gpus", "torch", "peers"]
NAMES += ["gpu memory", "cuda packages", "multicast", "nvshmem", "nvcc", "kernel"]


def lines(finished: Finished) -> dict[str, tuple[str, str]]:
    """State and text of each check by name."""
    found = [
        re.fullmatch(r"(ok|warn|missing|unneeded) +(.{14}) (.+)", line) for line in finished.stdout.splitlines()[:-2]
    ]
    assert all(found), finished.stdout
    return {match[2].strip(): (match[1], match[3]) for match in found if match}


def test_machine_without_a_gpu(runner: Runner) -> None:
    """The host twin works. What only a GPU needs is missing only if it is asked for, or a GPU is there but hidden."""
    finished = runner.distmk("doctor", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (finished.status, finished.stderr) == (0, "")
    checks = lines(finished)
    assert list(checks) == NAMES
    assert [checks[name][0] for name in NAMES[:5]] == ["ok"] * 5, finished.stdout
    assert "runs a program on two workers" in checks["host twin"][1]
    ends = finished.stdout.splitlines()[-2:]
    assert ends[0] == "host backend can run here"
    if why_no_cuda() == NO_GPU:
        assert checks["gpus"] == ("unneeded", f"not needed here: {NO_GPU}")
        assert "missing" not in {state for state, _ in checks.values()}, finished.stdout
        assert (
            ends[1]
            == "cuda backend needs a GPU, and this machine has none: distmk doctor --backend cuda says what else"
        )
    again = runner.distmk("doctor", "--backend", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert again.status == 1 and lines(again).keys() == checks.keys()
    assert lines(again)["gpus"][0] == "missing"
    assert again.stdout.splitlines()[-1].startswith("cuda backend cannot run here: see gpus")


def test_machine_without_a_compiler(runner: Runner) -> None:
    finished = runner.distmk("doctor", env={"DISTMK_CXX": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""})
    assert finished.status == 1
    checks = lines(finished)
    assert checks["compiler"][0] == checks["host twin"][0] == "missing"
    assert finished.stdout.splitlines()[-2] == "host backend cannot run here: see compiler, host twin"


@pytest.mark.whole
def test_host_twin_that_miscounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "run", lambda self, num_iterations: num_iterations)
    finding = host.check_host_twin()
    assert finding.state == "missing" and "counted to 0, expected 14" in finding.text


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_shared_memory(tmp_path / "nowhere").state == "missing"
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=64 << 8, f_frsize=4096))
    finding = host.check_shared_memory(tmp_path)
    assert finding.state == "warn" and finding.text.startswith("0.1 GB free in")


@pytest.mark.parametrize(("release", "state"), [("5.0.11", "ok"), ("4.1.6", "warn")])
def test_mpirun_of_another_mpi(release: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: somebody's\0")
    package = SimpleNamespace(rc=SimpleNamespace(), MPI=mpi, __version__="4.1.2")
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {release}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = host.check_mpi()
    assert finding.state == state and f"mpirun (Open MPI) {release} at {tmp_path}/mpirun" in finding.text
    assert package.rc.initialize is False, "looking must not start MPI"
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert host.check_mpi().state == "warn"


class Attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133


class PeerAttribute(enum.IntEnum):
    CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3


@dataclass(frozen=True)
class Machine:
    """The GPUs that the fakes report."""

    num_gpus: int = 4
    capability: tuple[int, int] = (9, 0)
    cooperative: int = 1
    mps: int = 0
    cuda: int = 13000
    torch_cuda: str | None = "13.0"
    free_bytes: int = 140 * 10**9
    can_access: Callable[[int, int], int] = lambda a, b: 1
    atomics: Callable[[int, int], int] = lambda a, b: 1

    def driver(self) -> Any:
        values = dict(zip(Attribute, (*self.capability, 132, self.cooperative, self.mps), strict=True))
        return SimpleNamespace(
            CUdevice_attribute=Attribute,
            CUresult=SimpleNamespace(CUDA_SUCCESS=0),
            CUdevice_P2PAttribute=PeerAttribute,
            cuInit=lambda flags: (0,),
            cuDeviceGetCount=lambda: (0, self.num_gpus),
            cuDeviceGet=lambda index: (0, index),
            cuDeviceGetName=lambda length, device: (0, b"NVIDIA H200".ljust(length, b"\0")),
            cuDeviceTotalMem=lambda device: (0, 150 * 10**9),
            cuDeviceGetAttribute=lambda kind, device: (0, values[kind]),
            cuDeviceCanAccessPeer=lambda device, peer: (0, self.can_access(device, peer)),
            cuDeviceGetP2PAttribute=lambda kind, device, peer: (0, self.atomics(device, peer)),
            cuDriverGetVersion=lambda: (0, self.cuda),
        )

    def torch(self) -> Any:
        info = (self.free_bytes, 150 * 10**9)
        version, cuda = SimpleNamespace(cuda=self.torch_cuda), SimpleNamespace(mem_get_info=lambda index: info)
        return SimpleNamespace(__version__="2.13.0", version=version, cuda=cuda)


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], dict[str, Finding]]:
    """The findings on a machine with all packages and a kernel for Hopper, but no nvcc."""
    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "NVSHMEM_HOME", "DISTMK_CUBIN_DIR", "NVSHMEM_SYMMETRIC_SIZE", *tools.MULTICAST_OFF):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("distmk.backends.cuda.toolchain._nvidia_packages", lambda: [])
    monkeypatch.setattr(host, "CHECKS", {})
    for name in ("cuda", "cuda.bindings", "cuda.core", "nvshmem", "nvshmem.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    (tmp_path / "kernel").write_text("a kernel")
    publish(tmp_path / "kernel", tmp_path / f"cuda-sm_90a-{build.source_key('sm_90a')}-tools.cubin")

    def find(machine: Machine) -> dict[str, Finding]:
        monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", machine.driver(), raising=False)
        monkeypatch.setitem(sys.modules, "torch", machine.torch())
        return {finding.name: finding for finding in examine()}

    return find


def test_machine_with_gpus(become: Callable[[Machine], dict[str, Finding]]) -> None:
    found = become(Machine())
    assert {name: finding.state for name, finding in found.items() if finding.state != "ok"} == {
        "nvshmem": "missing",
        "nvcc": "missing",
    }, "which only compiling needs"
    assert is_fit(list(found.values()), "cuda")
    assert found["gpus"].details[3] == (
        "3: NVIDIA H200, compute capability 9.0, 150 GB, 132 SMs, cooperative launch yes"
    )
    assert [line.split() for line in found["peers"].details] == [
        ["0", "1", "2", "3"],
        ["0", ".", "NV", "NV", "NV"],
        ["1", "NV", ".", "NV", "NV"],
        ["2", "NV", "NV", ".", "NV"],
        ["3", "NV", "NV", "NV", "."],
    ]
    assert found["torch"].text == "torch 2.13.0 for CUDA 13.0, driver for CUDA 13.0"
    assert found["gpu memory"].text == "free: 140.0 GB, 140.0 GB, 140.0 GB, 140.0 GB"
    assert "cuda-sm_90a-" in found["kernel"].text


FAULTS = {
    "old GPU": (Machine(capability=(8, 6)), "gpus", "missing", "GPU 0: the cuda backend does not run on a GPU of"),
    "no cooperative launch": (Machine(cooperative=0), "gpus", "warn", "GPU 0 has no cooperative launch"),
    "hidden GPUs": (Machine(num_gpus=0), "gpus", "missing", "CUDA_VISIBLE_DEVICES"),
    "old driver": (Machine(cuda=12080), "torch", "missing", "driver for CUDA 12.8; update the driver"),
    "torch without CUDA": (Machine(torch_cuda=None), "torch", "missing", "a build without CUDA"),
    "full GPU": (Machine(free_bytes=10**9), "gpu memory", "warn", "free: 1.0 GB, 1.0 GB, 1.0 GB, 1.0 GB; end what"),
    "one pair over PCIe": (Machine(atomics=lambda a, b: {a, b} != {1, 2}), "peers", "warn", "not all GPUs reach one"),
    "one way out of reach": (Machine(can_access=lambda a, b: (a, b) != (3, 0)), "peers", "warn", "not all GPUs reach"),
    "no kernel": (Machine(capability=(10, 0)), "kernel", "missing", "no nvcc: set CUDA_HOME"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, become: Callable[[Machine], dict[str, Finding]]) -> None:
    machine, name, state, text = FAULTS[fault]
    found = become(machine)
    assert found[name].state == state, found[name]
    assert text in found[name].text, found[name]
    assert is_fit(list(found.values()), "cuda") == (state == "warn")


@pytest.mark.parametrize(("mps", "how"), [(0, "in time slices of milliseconds"), (1, "side by side by MPS")])
def test_shared_gpus(
    mps: int, how: str, become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert become(Machine(mps=mps))["gpus"].text == "4, a rank each"
    monkeypatch.setenv("DISTMK_RANKS_PER_GPU", "3")
    found = become(Machine(mps=mps))["gpus"]
    assert found.state == "ok" and found.text.startswith(f"4, up to 3 ranks each, {how}")


def test_matrix_shows_gpus_without_a_link(become: Callable[[Machine], dict[str, Finding]]) -> None:
    machine = Machine(num_gpus=3, atomics=lambda a, b: {a, b} != {1, 2}, can_access=lambda a, b: (a, b) != (2, 0))
    rows = [line.split() for line in become(machine)["peers"].details[1:]]
    assert rows == [["0", ".", "NV", "NV"], ["1", "NV", ".", "P"], ["2", "-", "P", "."]]


def test_driver_that_fails(become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    become(Machine())
    monkeypatch.setattr(Machine, "driver", lambda self: SimpleNamespace(cuInit=fail))
    found = become(Machine())
    assert found["gpus"].state == "missing" and "no driver on this machine (Failed to dlopen" in found["gpus"].text
    assert not is_fit(list(found.values()), "cuda")


def test_variables(become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1G")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    found = become(Machine())
    assert found["gpu memory"].state == found["multicast"].state == "warn"
    assert "NVSHMEM_SYMMETRIC_SIZE=1G has no effect, distmk sets it" in found["gpu memory"].text
    assert "NVSHMEM_DISABLE_NVLS=0 asks for NVLink multicast" in found["multicast"].text
    assert is_fit(list(found.values()), "cuda")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    assert become(Machine())["multicast"].state == "ok"


def test_missing_package(become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    found = become(Machine())
    assert found["cuda packages"].state == "missing" and "nvshmem4py-cu13" in found["cuda packages"].text
    assert not is_fit(list(found.values()), "cuda")


def test_kernel_that_can_be_compiled(
    become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "find_toolchain", lambda: None)
    found = become(Machine(capability=(10, 0)))
    assert found["kernel"].state == "ok" and "distmk build --arch sm_100a does it now" in found["kernel"].text


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise ValueError("something\nunforeseen")

    monkeypatch.setattr(distmk.doctor.host, "CHECKS", {"odd": fail})
    assert next(examine()) == Finding("odd", "warn", "cannot be found out (ValueError: something)")


def test_gpu_that_cannot_be_used(
    become: Callable[[Machine], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that another process has for itself."""

    def fail(index: int) -> Any:
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")

    torch = Machine().torch()
    torch.cuda.mem_get_info = fail
    monkeypatch.setattr(Machine, "torch", lambda self: torch)
    found = become(Machine())
    assert found["gpu memory"].state == "missing" and "devices are busy" in found["gpu memory"].text
    assert not is_fit(list(found.values()), "cuda")
