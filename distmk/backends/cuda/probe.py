"""Measures how fast the kernel's loader could read a GPU's memory: the yardstick of a decode step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from distmk.backends.build_cache import cached, content_key, csrc_dir
from distmk.backends.cuda.build import architecture_of
from distmk.backends.cuda.driver import allow_shared_memory
from distmk.backends.cuda.toolchain import find_nvcc, run
from distmk.backends.kernel_sources import kernel_sources
from distmk.errors import UsageError

KERNEL = b"distmk_stream_probe"
STAGE_BYTES, NUM_STAGES, NUM_DRAINERS = 8192, 16, 8
FLAGS = (
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    f"-DPROBE_STAGE_BYTES={STAGE_BYTES}",
    f"-DPROBE_NUM_STAGES={NUM_STAGES}",
    f"-DPROBE_NUM_DRAINERS={NUM_DRAINERS}",
)
NO_LIMIT = 1 << 62


def probe_source() -> Path:
    return csrc_dir() / "tools" / "stream_probe.cu"


def compile_command(nvcc: Path, architecture: str, includes: Sequence[Path] = ()) -> list[str | Path]:
    """The command that compiles the probe, without the name of its output. `includes`: folders searched before csrc."""
    code = f"arch={architecture.replace('sm_', 'compute_')},code={architecture}"
    folders = [f"-I{folder}" for folder in (*includes, csrc_dir())]
    return [nvcc, *FLAGS, *folders, "-gencode", code, "-cubin", probe_source()]


def build_probe(architecture: str) -> Path:
    """The path of the compiled probe, from the cache if it is there. BuildError: no nvcc, or the cache cannot be written."""
    nvcc, version = find_nvcc()

    def make(scratch: Path) -> Path:
        cubin = scratch / "stream_probe.cubin"
        run([*compile_command(nvcc, architecture), "-o", cubin], scratch)
        return cubin

    key = content_key([version, architecture, *FLAGS], [probe_source(), *kernel_sources()])
    return cached(f"probe-{architecture}", ".cubin", key, make)


def read_bandwidth(device_id: int, num_bytes: int = 4 << 30, max_in_flight: int | None = 6, repeats: int = 5) -> float:
    """The bandwidth, in bytes per second, of reading `num_bytes` once; the median of `repeats` reads.

    `max_in_flight`: the most copies of 8 KB that an SM has in flight (None: all NUM_STAGES of its pipeline).
    BuildError: the probe cannot be compiled. UsageError: there is no room for `num_bytes`.
    """
    import torch
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    torch.cuda.set_device(device_id)
    device = Device(device_id)
    device.set_current()
    code = ObjectCode.from_cubin(build_probe(architecture_of(device.compute_capability)).read_bytes())
    kernel = code.get_kernel(KERNEL)
    allow_shared_memory(kernel, NUM_STAGES * STAGE_BYTES, device_id)
    grid = int(device.properties.multiprocessor_count)
    stages = num_bytes // (grid * STAGE_BYTES) // 4 * 4  # stages that each SM reads
    try:
        # Random data, not zeros: a GPU draws less power reading zeros, and may run faster.
        data = torch.empty(grid * stages * STAGE_BYTES, dtype=torch.uint8, device="cuda").random_()
    except torch.OutOfMemoryError:
        raise UsageError(f"the GPU has no {num_bytes / 1e9:.1f} GB free to read; free some of its memory") from None
    config = LaunchConfig(grid=grid, block=32 * (NUM_DRAINERS + 1), shmem_size=NUM_STAGES * STAGE_BYTES)
    own = device.create_stream()
    stream = torch.cuda.ExternalStream(int(own.handle), device=device_id)
    torch.cuda.synchronize()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for end in ends:  # back to back; the first launch warms up
        launch(own, config, kernel, data.data_ptr(), stages, max_in_flight or NO_LIMIT, data.data_ptr())
        end.record(stream)
    torch.cuda.synchronize()
    times_ms = [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]
    return float(data.numel() / (statistics.median(times_ms) / 1e3))
