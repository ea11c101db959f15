"""An engine without work notices a rank that is stopped or gone: `stats`, and with it a server's /health, names it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from distmk import LLM, SamplingParams
from distmk.bootstrap import star_root
from distmk.bootstrap.local import Followers
from distmk.errors import RankLostError

pytestmark = pytest.mark.timeout(120)


def follower() -> int:
    children = [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]
    (pid,) = [int(child) for child in children if b"worker_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return pid


def loss_of(llm: LLM, within_s: float) -> str:
    """The error of `stats`, which a server asks for all the time."""
    until = time.monotonic() + within_s
    with pytest.raises(RankLostError) as raised:
        while time.monotonic() < until:
            llm.stats()
            time.sleep(0.1)
    return str(raised.value)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("idle_exit_s", "sig", "told", "text"),
    [
        (0.0, signal.SIGSTOP, True, "rank 1 (pid {pid}) is stopped"),
        (None, signal.SIGSTOP, False, "rank 1 has not answered for 2 s; is it stopped?"),
        (0.0, signal.SIGKILL, True, "rank 1 (pid {pid}) was killed by SIGKILL"),
    ],
)
def test_idle_engine(
    idle_exit_s: float | None, sig: int, told: bool, text: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between launches, and in one that stays. `told`: the launcher knows whether a process is stopped."""
    if not told:
        monkeypatch.setattr(Followers, "describe_stop", lambda self, rank: None)
        monkeypatch.setattr(star_root, "SILENCE_S", 1.5)
    options = {"tensor_parallel_size": 2, "num_workers": 1, "max_model_len": 64, "idle_exit_s": idle_exit_s}
    with LLM(str(tiny_model), **options) as llm:  # type: ignore[arg-type]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        until = time.monotonic() + (1.0 if told else 3.0)
        while time.monotonic() < until:
            llm.stats()
            time.sleep(0.1)
        os.kill(pid := follower(), sig)
        try:
            assert loss_of(llm, 8.0) == text.format(pid=pid)
        finally:
            if sig == signal.SIGSTOP:  # so that closing need not kill it
                os.kill(pid, signal.SIGCONT)
