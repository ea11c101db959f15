"""Rungs 1 to 7: a step of short kernels, prepared by a rung's program, run, checked and timed."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.errors import LabError
from lab.gpu import NUM_THREADS, Gpu, Launch, Memory
from lab.kernels import load_rung
from lab.results import ChainTime
from lab.stats import Spread
from lab.workload import NUM_KERNELS, NUM_SINES, check, expected, inputs

WARM_STEPS = 3
BUDGET_S = 0.15  # of timed steps, of one rung at one size
MIN_STEPS, MAX_STEPS = 20, 100
STAMPED_STEPS = 9
MIN_ELEMENTS, MAX_ELEMENTS = 1 << 13, 1 << 25

Step = Callable[[], None]  # runs a step; returns when the host knows that it is over
Prepare = Callable[["Chain"], Step]


@dataclass(frozen=True)
class Chain:
    """A step for a rung to prepare: `num_kernels` kernels, each puts all `num` elements of `x` through the sines.

    `status`: a word that a kernel sets where something failed. Where `stamped`, kernel i notes at `stamp(i)` when it began
    and ended.
    """

    gpu: Gpu
    num: int
    num_kernels: int
    x: Memory
    stamps: Memory
    status: Memory
    stamped: bool = False

    @property
    def num_blocks(self) -> int:
        """An element a thread."""
        return -(-self.num // NUM_THREADS)

    def stamp(self, which: int = 0) -> Any:
        return ctypes.c_uint64(self.stamps.address + 16 * which if self.stamped else 0)

    def short_kernels(self) -> list[Launch]:
        """The step's kernels as launches of their own."""
        gpu, kernel = self.gpu, self.gpu.kernel("chain.cu", "chain_kernel")
        return [
            gpu.launch(kernel, self.num_blocks, self.x, self.num, self.stamp(which))
            for which in range(self.num_kernels)
        ]


class Bench:
    """Steps of one size on one GPU. `close` gives the memory back."""

    def __init__(self, gpu: Gpu, num: int, num_kernels: int = NUM_KERNELS) -> None:
        self._gpu, self._num_kernels = gpu, num_kernels
        self._fresh = gpu.upload(inputs(num))
        self.no_stamps = gpu.upload(np.array([[-1, 0]] * num_kernels, np.int64))  # begin is unsigned: the largest
        self.chain = Chain(
            gpu, num, num_kernels, gpu.empty(4 * num), gpu.empty(16 * num_kernels), gpu.upload(np.zeros(1, np.uint32))
        )
        gpu.copy(self._fresh, self.chain.x)
        self._want = expected(num, NUM_SINES * num_kernels)

    def close(self) -> None:
        for memory in (self._fresh, self.no_stamps, self.chain.x, self.chain.stamps, self.chain.status):
            self._gpu.free(memory)

    def measure(self, rung: str, prepare: Prepare) -> ChainTime:
        """LabError: wrong results, before or after the timed steps."""
        prepare(self.chain)  # compiles and loads
        began = time.perf_counter()
        step = prepare(self.chain)
        self._gpu.synchronize()
        prepare_us = 1e6 * (time.perf_counter() - began)
        error = self.verify(rung, step)
        times_us = self._time(step)
        error = max(error, self.verify(rung, step))
        busy_us, gap_us = self.stamped(prepare)
        return ChainTime(
            rung=rung,
            num_elements=self.chain.num,
            num_kernels=self._num_kernels,
            kernel_us=Spread.of(times_us).scaled(1 / self._num_kernels),
            busy_us=busy_us,
            gap_us=gap_us,
            prepare_us=prepare_us,
            error=error,
        )

    def verify(self, rung: str, step: Step) -> float:
        """Run a step on fresh inputs; the largest error of its results."""
        gpu, chain = self._gpu, self.chain
        gpu.fill(chain.status)
        gpu.copy(self._fresh, chain.x)
        step()
        if status := int(gpu.download(chain.status, np.uint32)[0]):
            raise LabError(f"rung {rung}: a launch on the GPU failed with CUDA error {status}")
        return check(
            f"rung {rung}", gpu.download(chain.x, np.float32), expected(chain.num, NUM_SINES * self._num_kernels)
        )

    def _time(self, step: Step) -> list[float]:
        """us of each step."""
        for _ in range(WARM_STEPS):
            step()
        began = time.perf_counter()
        step()
        num_steps = int(BUDGET_S / (time.perf_counter() - began))
        times_us = []
        for _ in range(min(max(num_steps, MIN_STEPS), MAX_STEPS)):
            began = time.perf_counter()
            step()
            times_us.append(1e6 * (time.perf_counter() - began))
        return times_us

    def stamped(self, prepare: Prepare) -> tuple[float, float | None]:
        """us of a step's kernels on the GPU, by their number; us between two of them, where there are several. Medians."""
        step = prepare(replace(self.chain, stamped=True))
        busy, gaps = [], []
        for _ in range(STAMPED_STEPS):
            self._gpu.copy(self.no_stamps, self.chain.stamps)
            step()
            stamps = self._gpu.download(self.chain.stamps, np.int64).reshape(-1, 2)
            begin, end = stamps[stamps[:, 1] > 0].T  # of the kernels that there were
            busy.append(float((end - begin).sum()) / self._num_kernels / 1e3)
            if len(begin) > 1:
                gaps.append(float((begin[1:] - end[:-1]).mean()) / 1e3)
        return statistics.median(busy), statistics.median(gaps) if gaps else None


def launch_call_us(gpu: Gpu) -> Spread:
    """What a launch call takes on the host, while the GPU keeps up."""
    bench = Bench(gpu, MIN_ELEMENTS)
    launches, times_us = bench.chain.short_kernels(), []
    for _ in range(100):
        began = time.perf_counter()
        for launch in launches:
            launch()
        times_us.append(1e6 * (time.perf_counter() - began) / len(launches))
        gpu.synchronize()
    bench.close()
    return Spread.of(times_us)


def clock_step_ns(gpu: Gpu) -> int:
    """What the GPU's clock, by which kernels are stamped, goes on by."""
    bench = Bench(gpu, MIN_ELEMENTS)
    step = load_rung(2).prepare(replace(bench.chain, stamped=True))
    step()
    gpu.copy(bench.no_stamps, bench.chain.stamps)
    step()
    stamps = gpu.download(bench.chain.stamps, np.int64)
    bench.close()
    return int(np.gcd.reduce(stamps - stamps[0]))


def calibrate(gpu: Gpu, targets_us: Sequence[float]) -> list[int]:
    """For each duration, the elements with which a kernel runs that long: the sines of an element stay the same.

    Elements are doubled until a kernel takes longer than all targets; between two sizes, logarithms are on a line. A GPU
    needs a while for any kernel at all: targets below that get the smallest one, once.
    """
    nums: list[int] = []
    durations: list[float] = []
    num = MIN_ELEMENTS
    while num <= MAX_ELEMENTS and (not durations or durations[-1] < max(targets_us)):
        bench = Bench(gpu, num)
        prepare = load_rung(2).prepare
        prepare(bench.chain)()
        durations.append(max(bench.stamped(prepare)[0], *durations[-1:], 0.001))
        bench.close()
        nums.append(num)
        num *= 2
    wanted = np.exp(np.interp(np.log(targets_us), np.log(durations), np.log(nums)))
    return sorted({round(each / MIN_ELEMENTS * 4) * MIN_ELEMENTS // 4 for each in wanted})
