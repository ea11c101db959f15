"""Run bootstrap_job.py under a launcher, and read the notes that its ranks write."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.helpers import Finished, Runner, mpirun_command, under_torchrun

SCRIPT = Path(__file__).with_name("bootstrap_job.py")
JOB = [sys.executable, str(SCRIPT)]


@dataclass
class Job:
    """The job in its own folder; its ranks write their notes to `out`."""

    runner: Runner
    out: Path

    def run(self, scenario: str, num_ranks: int, command: list[str] | None = None, **variables: str) -> Finished:
        """`num_ranks` is 0 under a launcher. `command` starts the ranks; by default rank 0 starts the others."""
        return self.runner.run([*(command or JOB), scenario, str(num_ranks), str(self.out)], variables)

    def notes(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))}


def check_exchange(notes: dict[str, dict[str, Any]], kind: str, size: int) -> None:
    assert sorted(notes) == [str(rank) for rank in range(size)]
    for name, note in notes.items():
        assert note["first"] == [f"from {rank}" for rank in range(size)]
        assert note["sizes"] == [6 + rank * 600_000 for rank in range(size)]
        assert note["shared"] == 300_000
        assert note["commands"] == ([] if name == "0" else ["do 0", "do 1", "do 2"])
        assert (note["kind"], note["size"]) == (kind, size)
        assert note["local"] == [int(name), size]
        assert len(note["hosts"]) == size


def mpirun() -> list[str]:
    """The job on three ranks."""
    return [*mpirun_command(), "-n", "3", *JOB]


def torchrun() -> list[str]:
    """The job on two ranks."""
    return under_torchrun(2)(JOB)
