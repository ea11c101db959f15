"""Lines that say what takes long, and ranges on a profiler's timeline."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from distmk import console
from distmk.console import progress
from distmk.nvtx_ranges import nvtx_range


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what takes long speaks, the innermost first, and on stderr."""
    monkeypatch.delenv("DISTMK_PROGRESS", raising=False)
    monkeypatch.setattr(console, "QUIET_S", 0.05)
    monkeypatch.setattr(console, "REPEAT_S", 0.15)
    with progress("loading"):
        with progress("short"):
            pass
        with progress("compiling"):
            time.sleep(0.1)
        time.sleep(0.2)
    with progress("another rank's", shown=False):
        time.sleep(0.1)
    monkeypatch.setenv("DISTMK_PROGRESS", "0")
    with progress("switched off"):
        time.sleep(0.1)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and lines[0] == "distmk: compiling ..." and len(lines) in (2, 3), lines
    assert all(line.startswith("distmk: loading ...") for line in lines[1:])


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
