"""Runs a scenario of graph_job.py, each rank a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.helpers import ROOT

JOB = Path(__file__).with_name("graph_job.py")


def run_job(tmp_path: Path, scenario: str, ranks: int, env: dict[str, str] | None = None, **options: Any) -> list[str]:
    """The note that every rank left: "done", or an error."""
    argv = [sys.executable, str(JOB), scenario, json.dumps({"ranks": ranks, **options}), str(tmp_path)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("DISTMK_FAULT")}
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **(env or {})}
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=90)
    notes = [(tmp_path / str(rank)) for rank in range(ranks)]
    assert all(note.exists() for note in notes), done.stderr[-4000:]
    return [note.read_text() for note in notes]


def assert_done(notes: list[str]) -> None:
    assert set(notes) == {"done"}, notes
