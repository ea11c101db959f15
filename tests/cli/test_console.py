"""Ranges on a profiler's timeline."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from distmk.nvtx_ranges import nvtx_range


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the package nvtx, else by a torch with CUDA that is loaded already, else nothing."""
    log: list[object] = []
    fake = SimpleNamespace(start_range=lambda name: log.append(name) or 7, end_range=log.append)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.setattr(fake, "__spec__", object(), raising=False)
    with pytest.raises(KeyError), nvtx_range("launch"):
        raise KeyError
    assert log == ["distmk: launch", 7]
    monkeypatch.delitem(sys.modules, "nvtx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cuda = SimpleNamespace(nvtx=SimpleNamespace(range_start=lambda name: log.append(name) or 8, range_end=log.append))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_nvtx=object())))
    with nvtx_range("load"):
        pass
    assert log[2:] == ["distmk: load", 8]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace()))
    with nvtx_range("load"):
        pass
    assert len(log) == 4
