"""Every rung on a GPU, at a small size. A rung checks its own results.

python -m pytest -q tests/examples/launch_lab/test_lab_gpu.py
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.helpers import ROOT, Runner, assert_one_line

from distmk.backends.defaults import why_no_cuda
from lab.chain import Bench, Chain, Step, calibrate, clock_step_ns
from lab.errors import LabError
from lab.gpu import Gpu, why_no_gpu
from lab.kernels import load_rung
from lab.run import task_graph

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    if reason := why_no_gpu():
        pytest.skip(reason)
    with Gpu(0) as opened:
        yield opened


@pytest.mark.parametrize("num", [1000, 300_001])
@pytest.mark.parametrize("rung", ["1", "2", "3", "4", "5", "6", "7", "7f"])
def test_chain(gpu: Gpu, rung: str, num: int) -> None:
    program = load_rung(int(rung[0]))
    if rung == "7" and not gpu.cooperative:
        pytest.skip("this GPU has no cooperative launch")
    bench = Bench(gpu, num, 6)
    found = bench.measure(rung, program.prepare_fallback if rung == "7f" else program.prepare)
    bench.close()
    assert found.error < 1e-5
    assert found.busy_us is not None and 0 < found.busy_us < 1.05 * found.kernel_us.high, found
    assert (found.gap_us is None) == (rung in ("4", "6")), found


def test_a_kernel_too_few_is_found(gpu: Gpu) -> None:
    rung = load_rung(4)

    def prepare(chain: Chain) -> Step:
        step: Step = rung.prepare(dataclasses.replace(chain, num_kernels=chain.num_kernels - 1))
        return step

    bench = Bench(gpu, 5000, 6)
    with pytest.raises(LabError, match="results are wrong, first at"):
        bench.measure("4", prepare)
    bench.close()


def test_calibration(gpu: Gpu) -> None:
    assert 1 <= clock_step_ns(gpu) <= 2000
    sizes = calibrate(gpu, (5.0, 40.0))
    durations = []
    for num in sizes:
        bench = Bench(gpu, num)
        durations.append(bench.stamped(load_rung(3).prepare)[0])
        bench.close()
    assert durations[-1] == pytest.approx(40.0, rel=0.3), durations


def test_work_queue(gpu: Gpu) -> None:
    found = load_rung(8).measure(gpu, items_a_block=4, repeats=2)
    assert sum(found.static.num_items) == sum(found.queue.num_items) == 4 * len(found.queue.busy_us)
    assert set(found.static.num_items) == {4} and found.error < 1e-5


def test_gemm(gpu: Gpu) -> None:
    pytest.importorskip("torch")
    found = load_rung(9).measure(gpu, 384, 640, 96, repeats=4)
    assert set(found.us) == {"a block a tile", "persistent, in turn", "persistent, counter", "torch"}


def test_drain(gpu: Gpu) -> None:
    found = load_rung(10).measure(gpu, num_bursts=12, repeats=4)
    assert found.num_launches.low >= 1 and found.error < 1e-5


def test_resident(gpu: Gpu) -> None:
    found = load_rung(11).measure(gpu, num_samples=100, power_s=0.2)
    assert all(len(way.us) == 100 for way in found.ways.values()) and len(found.ways) == 4


@pytest.mark.parametrize("backoff_ns", [0, 1000])
def test_resident_kernel_leaves_when_its_time_is_over(gpu: Gpu, backoff_ns: int) -> None:
    """Without any submission, the GPU is free again at the end of the kernel's lifetime."""
    rung = load_rung(11)
    submissions = rung.Submissions(gpu)
    launch: Any = rung.resident_launch(submissions, backoff_ns, lifetime_s=0.5)
    began = time.monotonic()
    launch()
    gpu.synchronize()
    assert 0.4 < time.monotonic() - began < 5
    assert submissions.left.words[0] == 1
    submissions.close()


def test_task_graph() -> None:
    if reason := why_no_gpu() or why_no_cuda():
        pytest.skip(reason)
    found = task_graph(0, 10_000)
    assert found.error < 1e-5 and found.busy_us is not None


def test_no_such_gpu(runner: Runner) -> None:
    if reason := why_no_gpu():
        pytest.skip(reason)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # packages may be found by it
    assert_one_line(runner.distmk("lab", "--gpu", "99", env={"PYTHONPATH": paths}), "--gpu 99: there is no such GPU")
