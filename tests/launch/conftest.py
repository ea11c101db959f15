"""The job that is run under each launcher."""

from __future__ import annotations

import pytest
from bootstrap_runs import Job
from support.helpers import Runner


@pytest.fixture
def job(runner: Runner) -> Job:
    runner.timeout_s = 60
    out = runner.folder / "out"
    out.mkdir()
    return Job(runner, out)
