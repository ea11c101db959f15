"""What the cuda backend does when a rank or a GPU is gone, with stand-ins for both."""

from __future__ import annotations

import atexit
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from distmk.abi import Abort
from distmk.cuda.backend import CudaBackend
from distmk.cuda.launch import CudaLaunch
from distmk.cuda.nvshmem import SymmetricHeap


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
    made._heap, made._closed, made._bootstrap = Recorder(), False, SimpleNamespace(timeout_s=1.0)
    return made


@pytest.mark.parametrize(("together", "call"), [(True, "close"), (False, "abandon")])
def test_close_is_collective_only_with_all_ranks(together: bool, call: str) -> None:
    made = backend(together, [])
    made.close()
    made.close()
    assert made._heap.calls == [call]
    assert made._liveness.calls == ["leave_together", "close"]


class FailingEvent:
    """A CUDA event after the GPU has failed."""

    @property
    def is_done(self) -> bool:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def sync(self) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def launch(lost: list[int]) -> Any:
    made: Any = CudaLaunch.__new__(CudaLaunch)
    made._backend, made._event = backend(False, lost), FailingEvent()
    made._backend._stream = made._event
    made.block = SimpleNamespace(token_count=SimpleNamespace(value=0))
    return made


def test_a_gpu_that_fails_with_a_peer_lost_the_peer() -> None:
    assert launch([1]).wait(0, 1.0) is True
    assert launch([1]).join() is Abort.RANK_LOST


def test_a_gpu_that_fails_by_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmk.cuda.launch.LOSS_S", 0.01)
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
