"""Rung 8: items of uneven cost, scheduled statically (round-robin), or dynamically through an atomic counter.

python examples/launch_lab/08_work_queue.py          (without a GPU: host threads)
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator

import numpy as np

from lab.alone import main
from lab.gpu import NUM_THREADS, Gpu
from lab.results import QueueTimes, Schedule
from lab.stats import Spread
from lab.workload import NUM_SINES, check, expected_items, inputs

SHARE = np.dtype([("begin_ns", np.int64), ("end_ns", np.int64), ("num_items", np.int64)])
MOST = 64  # largest cost of an item; the smallest is 1
HOST_ITEM, HOST_ITEMS = 65536, 64  # elements per item, and items, for host threads


def costs_of(num_items: int) -> np.ndarray:
    """Cost of each item, 1 to MOST: a truncated Pareto distribution, in which most items are short and a few long."""
    drawn = np.random.default_rng(8).pareto(1.2, num_items) + 1
    return np.minimum(drawn, MOST).astype(np.uint32)


def measure(gpu: Gpu, items_a_block: int = 16, repeats: int = 11) -> QueueTimes:
    counted = gpu.kernel("work_queue.cu", "items_queue")
    num_blocks = gpu.num_resident(counted)
    costs = costs_of(items_a_block * num_blocks)
    fresh, on_gpu = gpu.upload(inputs(len(costs) * NUM_THREADS)), gpu.upload(costs)
    x, shares, following = gpu.empty(fresh.num_bytes), gpu.empty(num_blocks * SHARE.itemsize), gpu.empty(4)
    arguments = (x, on_gpu, len(costs), shares)
    ways = {
        "static": gpu.launch(gpu.kernel("work_queue.cu", "items_static"), num_blocks, *arguments),
        "queue": gpu.launch(counted, num_blocks, *arguments, following),
    }
    want, errors, schedules = expected_items(costs * NUM_SINES, NUM_THREADS), [], {}
    for name, launch in ways.items():
        totals_us = []
        for _ in range(repeats):
            gpu.copy(fresh, x)
            gpu.fill(following)
            launch()
            took = gpu.download(shares, SHARE)
            totals_us.append((took["end_ns"].max() - took["begin_ns"].min()) / 1e3)
        errors.append(check(f"rung 8, {name}", gpu.download(x, np.float32), want))
        busy_us = (took["end_ns"] - took["begin_ns"]) / 1e3
        schedules[name] = Schedule(Spread.of(totals_us), busy_us.round(2).tolist(), took["num_items"].tolist())
    for memory in (fresh, on_gpu, x, shares, following):
        gpu.free(memory)
    return QueueTimes("gpu", schedules["static"], schedules["queue"], max(errors))


def measure_host(num_items: int = HOST_ITEMS, repeats: int = 5) -> QueueTimes:
    """`measure` on the host, with one thread per core; numpy releases Python's lock while it computes."""
    num_workers = max(2, len(os.sched_getaffinity(0)))
    costs, fresh = costs_of(num_items), inputs(num_items * HOST_ITEM).reshape(num_items, HOST_ITEM)
    want, errors, schedules = expected_items(costs * NUM_SINES, HOST_ITEM), [], {}
    for name in ("static", "queue"):
        totals_us = []
        for _ in range(repeats):
            x, counter = fresh.copy(), itertools.count()  # next() on it is atomic
            in_turn = [iter(range(worker, num_items, num_workers)) for worker in range(num_workers)]
            took = _run_threads(x, costs, in_turn if name == "static" else [counter] * num_workers)
            totals_us.append((took["end_ns"].max() - took["begin_ns"].min()) / 1e3)
        errors.append(check(f"rung 8, {name}", x, want))
        busy_us = (took["end_ns"] - took["begin_ns"]) / 1e3
        schedules[name] = Schedule(Spread.of(totals_us), busy_us.round(2).tolist(), took["num_items"].tolist())
    return QueueTimes("host", schedules["static"], schedules["queue"], max(errors))


def _run_threads(x: np.ndarray, costs: np.ndarray, sources: list[Iterator[int]]) -> np.ndarray:
    """Run one thread for each source of items, and return the SHARE of each thread."""
    shares, start = np.zeros(len(sources), SHARE), threading.Barrier(len(sources))

    def work(worker: int) -> None:
        start.wait()
        begin_ns, count = time.perf_counter_ns(), 0
        while (item := next(sources[worker], len(costs))) < len(costs):
            for _ in range(int(costs[item]) * NUM_SINES):
                np.sin(x[item], out=x[item])
            count += 1
        shares[worker] = begin_ns, time.perf_counter_ns(), count

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return shares


if __name__ == "__main__":
    main(__file__)
