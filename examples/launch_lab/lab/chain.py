"""Rungs 1 to 7: a step of short kernels, prepared by a rung's program, then checked and timed."""

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
BUDGET_S = 0.15  # for the timed steps of one rung at one size
MIN_STEPS, MAX_STEPS = 20, 100
STAMPED_STEPS = 9
MIN_ELEMENTS, MAX_ELEMENTS = 1 << 13, 1 << 25

Step = Callable[[], None]  # runs a step and returns when the host knows that it is done
Prepare = Callable[["Chain"], Step]


@dataclass(frozen=True)
class Chain:
    """The step that a rung prepares: `num_kernels` kernels, each of which applies the sines to all `num` floats of `x`.

    `status`: uint32, set by a kernel to the CUDA error of a failed launch. `stamped`: kernel i writes its begin and end
    times, in ns, to `stamp(i)`; otherwise the stamps are null pointers.
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
        """Blocks of a kernel with one element per thread."""
        return -(-self.num // NUM_THREADS)

    def stamp(self, which: int = 0) -> Any:
        """Kernel argument: address of the stamp of kernel `which`, or null."""
        return ctypes.c_uint64(self.stamps.address + 16 * which if self.stamped else 0)

    def short_kernels(self) -> list[Launch]:
        """One launch per kernel of the step."""
        gpu, kernel = self.gpu, self.gpu.kernel("chain.cu", "chain_kernel")
        return [
            gpu.launch(kernel, self.num_blocks, self.x, self.num, self.stamp(which))
            for which in range(self.num_kernels)
        ]


class Bench:
    """Measures steps of one size on one GPU. `close` frees the memory."""

    def __init__(self, gpu: Gpu, num: int, num_kernels: int = NUM_KERNELS) -> None:
        self._gpu, self._num_kernels = gpu, num_kernels
        self._fresh = gpu.upload(inputs(num))
        self.no_stamps = gpu.upload(np.array([[-1, 0]] * num_kernels, np.int64))  # -1: the largest unsigned begin
        self.chain = Chain(
            gpu, num, num_kernels, gpu.empty(4 * num), gpu.empty(16 * num_kernels), gpu.upload(np.zeros(1, np.uint32))
        )
        gpu.copy(self._fresh, self.chain.x)
        self._want = expected(num, NUM_SINES * num_kernels)

    def close(self) -> None:
        for memory in (self._fresh, self.no_stamps, self.chain.x, self.chain.stamps, self.chain.status):
            self._gpu.free(memory)

    def measure(self, rung: str, prepare: Prepare) -> ChainTime:
        """Prepare a step, check it, time it, check it again. LabError: a wrong result."""
        prepare(self.chain)  # compiles and loads the kernels, which the timed preparation below does not pay
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
        """Run a step on fresh inputs; return the largest absolute error. LabError: a wrong result or a failed launch."""
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
        """Time of each step in us."""
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
        """Medians, by the GPU's clock, in us: the time of a step's kernels per kernel, and the gap between two kernels.

        The gap is None if the rung runs the step as a single kernel.
        """
        step = prepare(replace(self.chain, stamped=True))
        busy, gaps = [], []
        for _ in range(STAMPED_STEPS):
            self._gpu.copy(self.no_stamps, self.chain.stamps)
            step()
            stamps = self._gpu.download(self.chain.stamps, np.int64).reshape(-1, 2)
            begin, end = stamps[stamps[:, 1] > 0].T  # stamps of the kernels that ran
            busy.append(float((end - begin).sum()) / self._num_kernels / 1e3)
            if len(begin) > 1:
                gaps.append(float((begin[1:] - end[:-1]).mean()) / 1e3)
        return statistics.median(busy), statistics.median(gaps) if gaps else None


def launch_call_us(gpu: Gpu) -> Spread:
    """Host time of one asynchronous launch call, in us; the queue of launches never fills."""
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
    """Resolution of the GPU's clock (%globaltimer), from which the stamps are read, in ns."""
    bench = Bench(gpu, MIN_ELEMENTS)
    step = load_rung(2).prepare(replace(bench.chain, stamped=True))
    step()
    gpu.copy(bench.no_stamps, bench.chain.stamps)
    step()
    stamps = gpu.download(bench.chain.stamps, np.int64)
    bench.close()
    return int(np.gcd.reduce(stamps - stamps[0]))


def calibrate(gpu: Gpu, targets_us: Sequence[float]) -> list[int]:
    """Numbers of elements at which a kernel runs for the targets; the work per element is constant.

    The number is doubled until a kernel lasts longer than every target; between two numbers, durations are interpolated
    log-log. Targets below the duration of the smallest kernel all map to that kernel, which is returned once.
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
