"""Runs all rungs on one GPU, or on the host those that can run there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import distmk
from distmk.backends.cuda.build import ARCHITECTURES, build_cubin
from distmk.backends.cuda.toolchain import find_nvcc
from distmk.backends.defaults import why_no_cuda
from distmk.errors import BuildError, UsageError
from lab.chain import Bench, Prepare, calibrate, clock_step_ns, launch_call_us
from lab.errors import LabError
from lab.gpu import Gpu
from lab.kernels import RUNGS, SOURCES, build, load_rung
from lab.power import Meter
from lab.results import PUBLISHED_US, ChainTime, LabReport
from lab.stats import Spread
from lab.workload import NUM_KERNELS, NUM_SINES, TOLERANCE

TARGETS_US = (2.0, 5.0, 10.0, 20.0, PUBLISHED_US, 100.0, 200.0)
MANY_KERNELS = 100  # length of the longer step that separates the cost per step from the cost per kernel
HOST_ELEMENTS = 4096
TASK_GRAPH_S = 120.0  # time limit of the process that measures one size
PACKAGES = ("cuda-bindings", "cuda-core", "torch", "numpy", "nvidia-ml-py")

Tell = Callable[[str], None]


def run_host(reason: str) -> LabReport:
    """Run rungs 8 and 12 on the host. `reason`: why there is no GPU."""
    began = time.perf_counter()
    report = LabReport(_machine(None), _settings())
    _guarded(report, "8", lambda: _set(report, "queue", load_rung(8).measure_host()))
    _guarded(report, "12", lambda: report.chain.append(load_rung(12).measure(HOST_ELEMENTS, "host")))
    report.left_out |= {rung: reason for rung in ("1", "2", "3", "4", "5", "6", "7", "7f", "9", "10", "11")}
    report.seconds = time.perf_counter() - began
    return report


def run_gpu(index: int, tell: Tell) -> LabReport:
    """Run all rungs on GPU `index`. UsageError: there is no such GPU, or no compiler for it."""
    began = time.perf_counter()
    with Gpu(index) as gpu:
        report = LabReport(_machine(gpu), _settings())
        tell("lab: compiling kernels, unless they are cached")
        _compile(gpu)
        report.machine["clock_step_ns"] = clock_step_ns(gpu)
        report.settings["launch_call_us"] = launch_call_us(gpu).median
        sizes = calibrate(gpu, TARGETS_US)
        tell(f"lab: rungs 1 to 7, kernels of {sizes[0]} to {sizes[-1]} elements")
        _run_chains(report, gpu, sizes)
        tell("lab: rungs 8 to 11")
        for number, name in ((8, "queue"), (9, "gemm"), (10, "drain"), (11, "resident")):
            _guarded(report, str(number), lambda n=number, f=name: _set(report, f, load_rung(n).measure(gpu)))  # type: ignore[misc]
    tell("lab: rung 12, a process a size")
    for size in sizes:
        _guarded(report, "12", lambda s=size: report.chain.append(task_graph(index, s)))  # type: ignore[misc]
    report.seconds = time.perf_counter() - began
    return report


def _run_chains(report: LabReport, gpu: Gpu, sizes: list[int]) -> None:
    steps = [(size, NUM_KERNELS) for size in sizes] + [(sizes[min(1, len(sizes) - 1)], MANY_KERNELS)]
    for num, num_kernels in steps:
        bench = Bench(gpu, num, num_kernels)
        for rung, prepare in _prepares().items():
            _guarded(report, rung, lambda r=rung, p=prepare, b=bench: report.chain.append(b.measure(r, p)))  # type: ignore[misc]
        bench.close()


def _prepares() -> dict[str, Prepare]:
    found = {str(number): load_rung(number).prepare for number in range(1, 8)}
    return {**found, "7f": load_rung(7).prepare_fallback}


def _guarded(report: LabReport, rung: str, measure: Callable[[], None]) -> None:
    """Measure a rung unless it has already failed or been left out. If either happens now, record it and carry on."""
    if rung in report.left_out or rung in report.failed:
        return
    try:
        measure()
    except (UsageError, ImportError) as error:
        report.left_out[rung] = " ".join(str(error).split())
    except LabError as error:
        report.failed[rung] = " ".join(str(error).split())


def _set(report: LabReport, name: str, value: Any) -> None:
    setattr(report, name, value)


def _compile(gpu: Gpu) -> None:
    """Compile all sources in parallel. A source that does not compile fails its rung later, not the run."""

    def attempt(make: Callable[[], Path]) -> None:
        try:
            make()
        except BuildError:
            return

    makes: list[Callable[[], Path]] = [lambda s=source: build(s, gpu.architecture) for source in SOURCES]  # type: ignore[misc]
    if gpu.architecture in ARCHITECTURES and not why_no_cuda():
        makes.append(lambda: build_cubin(gpu.architecture))
    find_nvcc()  # no compiler is an error of the whole run
    with ThreadPoolExecutor(len(makes)) as pool:
        list(pool.map(attempt, makes))


def task_graph(index: int, num: int) -> ChainTime:
    """Measure rung 12 on GPU `index` in a new process, because a process can initialise NVSHMEM only once."""
    if missing := why_no_cuda():
        raise UsageError(missing)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": visible[index] if index < len(visible) and visible[0] else str(index),
        "PYTHONPATH": os.pathsep.join([str(Path(distmk.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    program = RUNGS / "12_task_graph.py"
    command = [sys.executable, str(program), "--backend", "cuda", "--elements", str(num), "--json"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TASK_GRAPH_S)
    except subprocess.TimeoutExpired:
        raise LabError(f"rung 12: not done after {TASK_GRAPH_S:g} s") from None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    if done.returncode == UsageError.exit_code:
        raise UsageError(lines[-1])
    if done.returncode:
        raise LabError(f"rung 12: {lines[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])["12"]
    return ChainTime(**{**found, "kernel_us": Spread(**found["kernel_us"])})


def _settings() -> dict[str, Any]:
    return {
        "num_sines": NUM_SINES,
        "num_kernels": NUM_KERNELS,
        "many_kernels": MANY_KERNELS,
        "targets_us": list(TARGETS_US),
        "duration_by": "elements of a kernel",
        "tolerance": TOLERANCE,
    }


def _machine(gpu: Gpu | None) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu": None}
    if gpu:
        found = {
            "gpu": gpu.name,
            "architecture": gpu.architecture,
            "num_sms": gpu.num_sms,
            "cooperative_launch": gpu.cooperative,
            "driver": Meter(gpu.bus_id).driver_version,
            "driver_cuda": gpu.driver_cuda,
            "nvcc": find_nvcc()[1],
        }
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"python": platform.python_version(), "distmk": distmk.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "versions": versions}
