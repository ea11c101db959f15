"""Arguments beyond what any machine can serve are refused in one line, before a process is started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from distmk import LLM
from distmk.engine.engine_args import EngineArgs
from distmk.errors import UsageError

HUGE = 10**5000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", 100_000),
        ("num_schedulers", 10**12),
        ("max_model_len", 10**9),
        ("max_num_seqs", HUGE),
        ("deadline_s", float("inf")),
        ("deadline_s", float("nan")),
        ("deadline_s", 1e300),
        ("idle_exit_s", -1.0),
        ("idle_exit_s", float("nan")),
        ("trace_iterations", 10**12),
        ("trace_iterations", HUGE),
        ("trace_iterations", "a"),
        ("max_num_seqs", "a"),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("num_workers", [1]),
        ("deadline_s", "a"),
        ("idle_exit_s", "a"),
        ("seed", "a"),
        ("keep_logits", "a"),
        ("enable_prefix_caching", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_numbers(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is .*; expected ") as caught:
        EngineArgs(model="m", **{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("num_ranks", [65, 1000, 10**20, HUGE], ids=["65", "1000", "10**20", "huge"])
def test_too_many_ranks_start_nothing(num_ranks: int, endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process was started"))
    with pytest.raises(UsageError, match=r"the number of ranks is .*; expected 1 to 64"):
        LLM(str(endless), load_format="dummy", tensor_parallel_size=num_ranks)
