"""A refusal on several hosts is told on each of them, whichever rank meets it first."""

from __future__ import annotations

import pytest
from support.cluster import LAUNCHERS, MakeCluster, distmk
from support.faults import errors

pytestmark = pytest.mark.timeout(120)


def test_hosts_without_a_key_under_torchrun(make_cluster: MakeCluster) -> None:
    """torchrun ends the other ranks of a host as soon as one has ended, rank 0 among them."""
    command = distmk("generate", "--model", "qwen3-8b", "--load-format", "dummy", "--prompt-ids", "1")
    job = LAUNCHERS["torchrun"](make_cluster(2), command, 2, {"DISTMK_AUTHKEY": ""})
    for finished in job.wait():
        (line,) = [line for line in errors(finished) if line.startswith("distmk: ")]
        assert "ranks on several hosts need a key" in line and "secrets.token_hex(32)" in line
