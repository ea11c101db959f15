"""Rung 10: a kernel that drains a queue and exits; the host launches it again only if it has exited and more items came.

python examples/launch_lab/10_drain.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from lab.alone import main
from lab.errors import LabError
from lab.gpu import NUM_THREADS, Gpu, Launch, Memory, Words
from lab.results import DrainTimes
from lab.stats import Spread
from lab.workload import check, expected_items, inputs

MOST_SINES, LARGEST_BURST = 400, 16
DEADLINE_S = 5.0  # for all items; the host gives up then


def measure(gpu: Gpu, num_bursts: int = 64, repeats: int = 15) -> DrainTimes:
    rng = np.random.default_rng(10)
    bursts = rng.integers(1, LARGEST_BURST + 1, num_bursts).tolist()
    num_items = sum(bursts)
    sines = rng.integers(20, MOST_SINES, num_items)
    words = [(item + 1) << 32 | int(count) for item, count in enumerate(sines)]
    fresh, slots, tail = gpu.upload(inputs(num_items * NUM_THREADS)), gpu.words(num_items), gpu.words(1)
    x, head, known = gpu.empty(fresh.num_bytes), gpu.empty(4), gpu.empty(4)
    drain = gpu.launch(gpu.kernel("drain_queue.cu", "drain"), gpu.num_sms, slots, tail, head, known, x)
    want, errors = expected_items(sines, NUM_THREADS), []
    burst_launches = _burst_launches(gpu, bursts, slots, x)

    def by_bursts() -> int:
        item = 0
        for size, launch in zip(bursts, burst_launches, strict=True):
            item = _push(slots, words, item, size)
            launch()
        gpu.synchronize()
        return num_bursts

    def by_draining() -> int:
        item = num_launches = 0
        for size in bursts:
            item = tail.words[0] = _push(slots, words, item, size)
            if gpu.is_idle():
                drain()
                num_launches += 1
        return num_launches + _drain_rest(gpu, drain, head, num_items)

    def timed(way: Callable[[], int], what: str) -> tuple[Spread, Spread]:
        times_us, counts = [], []
        for _ in range(repeats):
            slots.words[:] = [0] * num_items
            tail.words[0] = 0
            gpu.copy(fresh, x)
            for memory in (head, known):
                gpu.fill(memory)
            gpu.synchronize()
            began = time.perf_counter()
            counts.append(way())
            times_us.append(1e6 * (time.perf_counter() - began))
            errors.append(check(f"rung 10, {what}", gpu.download(x, np.float32), want))
        return Spread.of(times_us[2:]), Spread.of(counts[2:])

    burst_us, _ = timed(by_bursts, "a launch a burst")
    drain_us, num_launches = timed(by_draining, "draining")
    for memory in (fresh, x, head, known):
        gpu.free(memory)
    return DrainTimes(num_items, num_bursts, burst_us, drain_us, num_launches, max(errors))


def _burst_launches(gpu: Gpu, bursts: list[int], slots: Words, x: Memory) -> list[Launch]:
    kernel, firsts = gpu.kernel("drain_queue.cu", "burst"), np.cumsum([0, *bursts]).tolist()
    return [gpu.launch(kernel, size, slots, first, x) for size, first in zip(bursts, firsts, strict=False)]


def _push(slots: Words, words: list[int], first: int, count: int) -> int:
    """Publish `count` items from item `first` on, each by one store; returns the number of items in the queue."""
    for item in range(first, first + count):
        slots.words[item] = words[item]
    return first + count


def _drain_rest(gpu: Gpu, drain: Launch, head: Memory, num_items: int) -> int:
    """Launch until the queue is empty; the number of launches. LabError: DEADLINE_S has passed.

    The last kernel may have found the queue empty before the host pushed, and exited after the host saw it run.
    """
    num_launches, until = 0, time.monotonic() + DEADLINE_S
    while int(gpu.download(head, np.uint32)[0]) < num_items:
        if time.monotonic() > until:
            raise LabError(f"rung 10: the queue was not drained within {DEADLINE_S:g} s")
        drain()
        num_launches += 1
    return num_launches


if __name__ == "__main__":
    main(__file__)
