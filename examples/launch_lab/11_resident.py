"""Rung 11: a resident kernel that polls a ring in pinned host memory, against kernel launches and graph replays.

python examples/launch_lab/11_resident.py
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from lab.alone import main
from lab.errors import LabError
from lab.gpu import NUM_THREADS, Gpu, Launch
from lab.power import Meter
from lab.results import Latency, ResidentTimes
from lab.stats import Spread
from lab.workload import check, expected, inputs

RING = 64  # slots
LEAVE = 0xFFFFFFFF  # as in resident.cu
BACKOFF_NS = 1000
WARM = 50
DEADLINE_S = 5.0  # for one submission; the host gives up then
SPARE_S = 15.0  # lifetime of the kernel beyond the time that the measurement needs
PACE_S = 0.001  # between submissions while power is measured
SETTLE = 0.4  # warm-up for clocks and counter before power is measured, as a fraction of that time


class Work(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("num", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("arrived", ctypes.c_uint64),
        ("num_sines", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
    )


class Submissions:
    """Submissions, one at a time, numbered from 1. A submission is one word: its number, and how many sines to apply."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.num = gpu, gpu.num_sms * NUM_THREADS
        self.ring, self.done, self.left, self.word = gpu.words(RING), gpu.words(1), gpu.words(1), gpu.words(1)
        self.sent = gpu.empty(8)  # the GPU's copy of `word`
        self.x, self.y = gpu.upload(inputs(self.num)), gpu.empty(4 * self.num)
        self.relay, self._arrived, self._num_sines = gpu.empty(8 * RING), gpu.empty(8), gpu.empty(8)
        addresses = (each.address for each in (self._arrived, self._num_sines, self.done))
        self.work = Work(self.x.address, self.y.address, self.num, 0, *addresses)
        self.reset()

    def reset(self) -> None:
        """Start again at submission 1. No kernel may run."""
        self.number = self._asked = 0
        for memory in (self.y, self.relay, self._arrived, self._num_sines):
            self.gpu.fill(memory)
        self.gpu.synchronize()
        for shared in (self.ring, self.done, self.left):
            ctypes.memset(shared.address, 0, ctypes.sizeof(shared.words))

    def next_word(self) -> int:
        """The word of the next submission."""
        self.number += 1
        num_sines = 16 + self.number % 9
        self._asked += num_sines
        return self.number << 32 | num_sines

    def wait(self) -> None:
        """Wait until the last submission is done. LabError: DEADLINE_S has passed."""
        done, number = self.done.words, self.number
        until = time.monotonic() + DEADLINE_S
        while done[0] != number:
            if time.monotonic() > until:
                raise LabError(f"rung 11: submission {number} was not done within {DEADLINE_S:g} s; done is {done[0]}")

    def verify(self, what: str) -> float:
        """The largest absolute error of the last submission. LabError: a wrong result, or a submission not run exactly once."""
        found = int(self.gpu.download(self._num_sines, np.uint64)[0])
        if found != self._asked:
            raise LabError(f"rung 11, {what}: {found} sines were run, {self._asked} were asked for")
        last = 16 + self.number % 9
        return check(f"rung 11, {what}", self.gpu.download(self.y, np.float32), expected(self.num, last))

    def close(self) -> None:
        for memory in (self.x, self.y, self.relay, self.sent, self._arrived, self._num_sines):
            self.gpu.free(memory)


Submit = Callable[[int], None]


def resident_launch(queue: Submissions, backoff_ns: int, lifetime_s: float) -> Launch:
    gpu, lifetime_ns = queue.gpu, ctypes.c_uint64(int(1e9 * lifetime_s))
    kernel = gpu.kernel("resident.cu", "resident")
    arguments = (queue.ring, queue.relay, RING, backoff_ns, lifetime_ns, queue.work, queue.left)
    return gpu.launch(kernel, gpu.num_sms, *arguments, cooperative=gpu.cooperative)


@contextmanager
def resident(queue: Submissions, backoff_ns: int, lifetime_s: float) -> Iterator[Submit]:
    """The kernel runs inside the `with` block. No driver call may be made there: it might wait for the kernel."""
    gpu, ring = queue.gpu, queue.ring.words
    resident_launch(queue, backoff_ns, lifetime_s)()

    def submit(word: int) -> None:
        ring[(word >> 32) % RING] = word

    try:
        yield submit
    finally:
        if queue.done.words[0] != queue.number:
            submit(queue.number << 32 | LEAVE)  # after an interrupt this number may never have been submitted
        number = queue.number + 1
        submit(number << 32 | LEAVE)
        gpu.synchronize()  # returns at the latest at the end of the kernel's lifetime
    if queue.left.words[0] != number:
        raise LabError(f"rung 11: the resident kernel left at submission {queue.left.words[0]}, told to at {number}")


@contextmanager
def launches(queue: Submissions) -> Iterator[Submit]:
    gpu, word = queue.gpu, ctypes.c_uint64(0)
    launch = gpu.launch(gpu.kernel("resident.cu", "submission"), gpu.num_sms, word, None, queue.work)

    def submit(value: int) -> None:
        word.value = value
        launch()

    yield submit
    gpu.synchronize()


@contextmanager
def replays(queue: Submissions) -> Iterator[Submit]:
    """Graph replays. A graph's arguments are fixed, so it first copies the word to the GPU, where every block reads it."""
    gpu, word = queue.gpu, queue.word
    kernel = gpu.kernel("resident.cu", "submission")
    launch = gpu.launch(kernel, gpu.num_sms, ctypes.c_uint64(0), queue.sent, queue.work)

    def enqueue() -> None:
        gpu.send(word, queue.sent)
        launch()

    replay = gpu.capture(enqueue)

    def submit(value: int) -> None:
        word.words[0] = value
        replay()

    yield submit
    gpu.synchronize()


def measure(gpu: Gpu, num_samples: int = 2000, power_s: float = 2.5) -> ResidentTimes:
    queue, meter = Submissions(gpu), Meter(gpu.bus_id)
    lifetime_s = power_s + num_samples * 1e-3 + SPARE_S
    ways = {
        "resident": lambda: resident(queue, 0, lifetime_s),
        "resident, backs off": lambda: resident(queue, BACKOFF_NS, lifetime_s),
        "kernel launch": lambda: launches(queue),
        "graph replay": lambda: replays(queue),
    }
    found, errors = {}, []
    for name, way in ways.items():
        queue.reset()
        with way() as submit:
            latencies = _latencies(queue, submit, num_samples)
            watts, rate = _power(queue, submit, meter, power_s)
        errors.append(queue.verify(name))
        found[name] = Latency([round(each, 2) for each in latencies], Spread.of(latencies), watts)
    time.sleep(SETTLE * power_s)
    idle_watts = meter.watts(lambda: time.sleep(power_s))
    queue.close()
    return ResidentTimes(found, idle_watts, rate, max(errors))


def _latencies(queue: Submissions, submit: Submit, num_samples: int) -> list[float]:
    """Time of each submission until the host sees it done, in us."""
    times_us = []
    gc.disable()
    try:
        for _ in range(WARM + num_samples):
            word = queue.next_word()
            began = time.perf_counter()
            submit(word)
            queue.wait()
            times_us.append(1e6 * (time.perf_counter() - began))
    finally:
        gc.enable()
    return times_us[WARM:]


def _power(queue: Submissions, submit: Submit, meter: Meter, seconds: float) -> tuple[float | None, float]:
    """Mean board power in W at a low rate of submissions, and that rate per second."""
    count = 0

    def pace(for_s: float) -> None:
        nonlocal count
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            submit(queue.next_word())
            queue.wait()
            count += 1
            time.sleep(PACE_S)

    pace(SETTLE * seconds)
    count = 0
    return meter.watts(lambda: pace(seconds)), count / seconds


if __name__ == "__main__":
    main(__file__)
