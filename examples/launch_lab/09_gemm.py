"""Rung 9: a persistent GEMM whose blocks take tiles from an atomic counter, against one block per tile.

python examples/launch_lab/09_gemm.py
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from lab.alone import main
from lab.gpu import Gpu
from lab.results import GemmTimes
from lab.stats import Spread
from lab.workload import check

TILE, DEPTH = 128, 32  # as in gemm.cu
TOLERANCE = 0.02  # absolute; the results, sums of k products of standard normals, have standard deviation sqrt(k) = 32


class Problem(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("c", ctypes.c_uint64),
        ("m", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
    )


def measure(gpu: Gpu, m: int = 4096, n: int = 4096, k: int = 1024, repeats: int = 15) -> GemmTimes:
    """C [m, n] = A [m, k] B [k, n] in bf16, float32 out. `m` and `n` are multiples of TILE, `k` of DEPTH."""
    torch.manual_seed(9)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    want = (a.float() @ b.float()).double().numpy()  # products of bf16 are exact in float32
    a_there, b_there = (gpu.upload(each.view(torch.int16).numpy()) for each in (a, b))
    c = gpu.empty(4 * m * n)
    stamp, following, no_stamp = gpu.empty(16), gpu.empty(4), gpu.upload(np.array([-1, 0], np.int64))
    problem = Problem(a_there.address, b_there.address, c.address, m, n, k)
    num_tiles = (m // TILE) * (n // TILE)

    def launch_of(name: str, *more: object, persistent: bool = True) -> object:
        kernel = gpu.kernel("gemm.cu", name)
        num_blocks = min(gpu.num_resident(kernel), num_tiles) if persistent else num_tiles
        return gpu.launch(kernel, num_blocks, problem, stamp, *more)

    ways = {
        "a block a tile": launch_of("gemm_grid", persistent=False),
        "persistent, in turn": launch_of("gemm_static"),
        "persistent, counter": launch_of("gemm_counter", following),
    }
    found, errors = {}, []
    for name, launch in ways.items():
        gpu.fill(c, 0xFF)  # NaN
        times_us = []
        for _ in range(repeats):
            gpu.copy(no_stamp, stamp)
            gpu.fill(following)
            launch()
            begin, end = gpu.download(stamp, np.int64)
            times_us.append((end - begin) / 1e3)
        errors.append(check(f"rung 9, {name}", gpu.download(c, np.float32), want, TOLERANCE))
        found[name] = Spread.of(times_us[2:])
    for memory in (a_there, b_there, c, stamp, following, no_stamp):
        gpu.free(memory)
    found["torch"] = _torch(a.to(f"cuda:{gpu.index}"), b.to(f"cuda:{gpu.index}"), repeats)
    return GemmTimes(m, n, k, found, max(errors))


def _torch(a: torch.Tensor, b: torch.Tensor, repeats: int) -> Spread:
    """GPU time of torch's own product, in us."""
    times_us = []
    with torch.cuda.device(a.device):
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.matmul(a, b)
            end.record()
            end.synchronize()
            times_us.append(1e3 * begin.elapsed_time(end))
    return Spread.of(times_us[2:])


if __name__ == "__main__":
    main(__file__)
