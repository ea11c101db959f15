"""The cuda backend without a GPU: closing, failing and cut launches, and the assignment of GPUs to ranks, with fakes."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distmk.abi import MAX_OWN_SCHEDULERS, Abort, HostCounts, LaunchParams, Space
from distmk.backends.cuda.backend import CudaBackend
from distmk.backends.cuda.gpus import check_residence, check_sharing, gpu_of, num_sharing, num_sms_of
from distmk.backends.cuda.launch import MAX_POLL_S, POLL_S, CudaLaunch
from distmk.backends.cuda.nvshmem import SymmetricHeap
from distmk.backends.defaults import check_schedulers, choose_workers
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine.session import make_backend
from distmk.errors import UsageError
from distmk.program.layout import Placed


class Recorder:
    """Remembers the calls made on it; `answers` are what they return."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return self.answers.get(name)

        return call


def backend(together: bool, lost: list[int]) -> Any:
    made: Any = CudaBackend.__new__(CudaBackend)
    made._liveness = Recorder(leave_together=together, lost_ranks=lost)
    made._liveness.far_ranks = []
    made._heap, made._closed, made._bootstrap = Recorder(), False, SimpleNamespace(timeout_s=1.0)
    return made


@pytest.mark.parametrize(("together", "call"), [(True, "close"), (False, "abandon")])
def test_close_is_collective_only_with_all_ranks(together: bool, call: str) -> None:
    made = backend(together, [])
    made.close()
    made.close()
    assert made._heap.calls == [call]
    assert made._liveness.calls == ["leave_together", "close"]


@pytest.mark.parametrize(("met", "call"), [(True, "close"), (False, "abandon")])
def test_close_waits_for_other_hosts(met: bool, call: str) -> None:
    made = backend(True, [])
    made._liveness.far_ranks = [1]
    made._bootstrap.meet = lambda place, timeout_s: met
    made.close()
    assert made._heap.calls == [call]


class FailingEvent:
    """A CUDA event after the GPU has failed."""

    @property
    def is_done(self) -> bool:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def sync(self) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def launch(lost: list[int]) -> Any:
    made: Any = CudaLaunch.__new__(CudaLaunch)
    made._job, made._event = backend(False, lost), FailingEvent()
    made._context = SimpleNamespace(stream=made._event)
    made.block = SimpleNamespace(counts=HostCounts())
    return made


def test_a_gpu_that_fails_with_a_peer_lost_the_peer() -> None:
    assert launch([1]).wait(1.0) is True
    assert launch([1]).join() is Abort.RANK_LOST


def test_a_gpu_that_fails_by_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmk.backends.cuda.launch.LOSS_S", 0.01)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        launch([]).join()


def test_an_abandoned_heap_is_never_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *arguments: at_exit.append(arguments))
    heap: Any = SymmetricHeap.__new__(SymmetricHeap)
    heap._module, heap.tensor = object(), object()
    held = sys.getrefcount(heap.tensor)
    heap.abandon()
    heap.abandon()
    gained = sys.getrefcount(heap.tensor) - held
    assert gained == 1
    assert len(at_exit) == 1
    heap.close()  # nothing is left to give back


def memory_of(num_bytes: int) -> tuple[Any, Any]:
    """A backend whose heap and arena are in this process's memory, and the heap."""
    heap: Any = SymmetricHeap.__new__(SymmetricHeap)
    heap._lent, heap._module, heap.tensor = [], object(), torch.zeros(num_bytes, dtype=torch.uint8)
    made: Any = CudaBackend.__new__(CudaBackend)
    made._heap, made._context = heap, SimpleNamespace(local=torch.zeros(num_bytes, dtype=torch.uint8))
    return made, heap


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("space", [Space.HEAP, Space.LOCAL])
def test_a_tensor_is_the_memory_and_a_view_is_a_copy(space: Space, dtype: str, torch_dtype: torch.dtype) -> None:
    made, heap = memory_of(1024)
    placed = Placed("b", space, -1, 256, 2, 16)
    tensor = made.tensor(placed, dtype)
    assert tensor.dtype is torch_dtype and tensor.shape == (2, 16 // torch_dtype.itemsize)
    values = torch.randn(tensor.shape).to(torch_dtype)
    tensor.copy_(values)
    memory = heap.tensor if space is Space.HEAP else made._context.local
    assert torch.equal(memory[256:288], values.view(torch.uint8).flatten()) and memory.count_nonzero() <= 32
    view = made.view(placed, np.uint8)
    assert view.tobytes() == values.view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


class FreedHeap(Recorder):
    """NVSHMEM, which overwrites memory that is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.interop = SimpleNamespace(torch=SimpleNamespace(free_tensor=lambda tensor: tensor.fill_(0xDD)))


@pytest.mark.parametrize("has_room", [True, False])
def test_no_tensor_is_left_in_a_heap_that_is_gone(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """What callers still hold has its last contents, or nothing if there is no room for them."""
    made, heap = memory_of(1024)
    heap._nvshmem = FreedHeap()
    places = [Placed("b", Space.HEAP, -1, offset, 2, 16) for offset in (0, 256, 512)]
    held, dropped, other = (
        made.tensor(placed, dtype) for placed, dtype in zip(places, ("f32", "u8", "bf16"), strict=True)
    )
    del dropped
    held.fill_(1.5)
    other.requires_grad_()

    def synchronize() -> None:
        if not has_room:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    heap.close()
    assert (heap.tensor == 0xDD).all()
    if has_room:
        assert torch.equal(held, torch.full((2, 4), 1.5)) and not other.any() and other.shape == (2, 8)
    else:
        assert held.numel() == other.numel() == 0


class CutLaunch(CudaLaunch):
    """A launch whose kernels end at once, after `length` iterations (0: all) of `num_iterations` in all."""

    def __init__(self, length: int, num_iterations: int, aborted_at: int | None = None) -> None:
        self._params: Any = LaunchParams(max_iterations=length)
        self._length, self._num_iterations, self._aborted_at = length, num_iterations, aborted_at
        self.starts: list[int] = []
        self._job: Any = SimpleNamespace(abort_reason=self._abort_reason, lost_ranks=list)
        self._context: Any = SimpleNamespace(stream=Recorder(), rank=0)
        self._event = SimpleNamespace(is_done=True)
        self.block: Any = SimpleNamespace(counts=HostCounts())
        self._start()

    def _start(self) -> None:
        self.starts.append(self._params.first_iteration)
        end = self._params.first_iteration + self._length if self._length else self._num_iterations
        self._params.iterations_done = min(end, self._num_iterations)

    def _abort_reason(self) -> Abort:
        aborted = self._aborted_at is not None and self._params.iterations_done >= self._aborted_at
        return Abort.INTERRUPTED if aborted else Abort.NONE


@pytest.mark.parametrize(
    ("length", "aborted_at", "starts", "reason"),
    [
        (0, None, [0], Abort.NONE),
        (100, None, [0], Abort.NONE),
        (1, None, [0, 1, 2, 3, 4, 5], Abort.NONE),  # the last finds that nothing is left
        (2, None, [0, 2, 4], Abort.NONE),
        (2, 3, [0, 2], Abort.INTERRUPTED),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_continues_where_the_last_one_ended(
    length: int, aborted_at: int | None, starts: list[int], reason: Abort, waits: bool
) -> None:
    launch = CutLaunch(length, 5, aborted_at)
    if waits:
        while not launch.wait(1.0):
            pass
    assert launch.join() is reason
    assert launch.starts == starts


@pytest.mark.parametrize(
    ("rank", "length", "lasted_s", "nap_s"),
    [(0, 0, 600, POLL_S), (1, 1, 600, POLL_S), (1, 0, 0, POLL_S), (1, 0, 2, 0.002), (1, 0, 600, MAX_POLL_S)],
)
def test_only_who_waits_for_tokens_looks_often(rank: int, length: int, lasted_s: float, nap_s: float) -> None:
    launch = CutLaunch(length, 5)
    launch._context.rank, launch._began_s = rank, time.monotonic() - lasted_s
    assert launch._nap_s() == pytest.approx(nap_s, rel=0.2)


def test_room_for_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmk.backends.cuda.gpus.num_sms_of", lambda local_rank: 132)
    here: Any = SimpleNamespace(local_rank=0, local_size=1)
    assert choose_workers(None, "cuda", here) == choose_workers(132, "cuda", here, True) == 132
    assert choose_workers(None, "cuda", here, True) == 131
    most_of = {"cuda": MAX_OWN_SCHEDULERS, "emulated": MAX_OWN_SCHEDULERS, "host": 131}
    for backend, most in most_of.items():
        check_schedulers(None, 131, backend)
        check_schedulers(most, 131, backend)
        with pytest.raises(UsageError, match="131 workers" if backend == "host" else "warps for 12"):
            check_schedulers(most + 1, 131, backend)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 132 SMs each."""
    properties = SimpleNamespace(multi_processor_count=132)
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda gpu: properties)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    ("most", "mps", "gpus", "num_sms"),
    [
        (1, False, [0, 1], 132),
        (2, False, [0, 1, 0, 1], 132),
        (2, True, [0, 1, 0, 1], 66),
        (3, True, [0, 1] * 3, 44),
    ],
)
def test_which_gpu_a_rank_has(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, most: int, mps: bool, gpus: list[int], num_sms: int
) -> None:
    monkeypatch.setenv("DISTMK_RANKS_PER_GPU", str(most))
    monkeypatch.setattr("distmk.backends.cuda.gpus.runs_mps", lambda gpu: mps)
    assert [gpu_of(rank) for rank in range(len(gpus))] == gpus
    assert {num_sms_of(rank) for rank in range(len(gpus))} == {num_sms}
    assert [num_sharing(size) for size in (1, 2, 3, 5)] == [1, 1, 2, 3]
    with pytest.raises(UsageError, match=f"local rank {2 * most} has no GPU: 2 are .*_PER_GPU={most + 1}"):
        gpu_of(len(gpus))


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_no_number_of_ranks(two_gpus: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTMK_RANKS_PER_GPU", text)
    with pytest.raises(UsageError, match=r"DISTMK_RANKS_PER_GPU=.* is no number of ranks"):
        gpu_of(0)


@pytest.mark.parametrize("backend", ["cuda", "emulated"])
def test_no_room_for_schedulers_of_a_graph(backend: str) -> None:
    program: Any = SimpleNamespace(header=SimpleNamespace(num_schedulers=MAX_OWN_SCHEDULERS + 1))
    with pytest.raises(UsageError, match="13 schedulers do not fit"):
        make_backend(backend, program, SingleBootstrap(1.0), scheduler_threads=True)


@pytest.mark.parametrize(
    ("uuids", "ranks"),
    [("a", None), ("abcd", None), ("aa", "ranks 0, 1"), ("abcb", "ranks 1, 3"), ("cabab", "ranks 1, 3")],
)
def test_no_launch_stays_on_a_gpu_that_ranks_share_in_time_slices(uuids: str, ranks: str | None) -> None:
    check_sharing(list(uuids), mps=True)
    if ranks is None:
        check_sharing(list(uuids), mps=False)
    else:
        with pytest.raises(UsageError, match=f"^{ranks} share a GPU without MPS.*--idle exit"):
            check_sharing(list(uuids), mps=False)


@pytest.mark.parametrize(("blind", "refused"), [(None, False), (0, True), (3, True)])
def test_ranks_that_share_gpus_are_refused_alike(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, blind: int | None, refused: bool
) -> None:
    """Four ranks on two GPUs, also where only rank `blind` finds no MPS: each gets the same error, and none waits."""
    monkeypatch.setenv("DISTMK_RANKS_PER_GPU", "2")
    monkeypatch.setattr("distmk.backends.cuda.gpus.uuid_of", str)
    monkeypatch.setattr("distmk.backends.cuda.gpus.runs_mps", lambda gpu: threading.current_thread().name != str(blind))
    met, parts, found = threading.Barrier(4, timeout=10), {}, {}

    def work(rank: int) -> None:
        def allgather(part: bytes) -> list[bytes]:
            met.wait()
            parts[rank] = part
            met.wait()
            return [parts[each] for each in range(4)]

        try:
            found[rank] = check_residence(SimpleNamespace(local_rank=rank, allgather=allgather))  # type: ignore[arg-type]
        except UsageError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == set(range(4)) and len(set(found.values())) == 1
    assert ("ranks 0, 2 share a GPU" in str(found[3])) == refused
