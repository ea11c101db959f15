"""Ranks on two hosts find each other under every launcher, and know their local rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cluster import LAUNCHERS, MakeCluster
from support.helpers import ROOT

pytestmark = pytest.mark.timeout(120)

JOB = str(ROOT / "tests" / "launch" / "bootstrap_job.py")
KINDS = {"mpirun": "mpi", "torchrun": "torch", "c10d": "torch", "srun": "slurm"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_two_hosts_exchange(launcher: str, make_cluster: MakeCluster, notes: Path) -> None:
    """Two ranks a host; the hosts have their own names, loopback interfaces and shared memory."""
    cluster = make_cluster(2)
    finished = LAUNCHERS[launcher](cluster, [JOB, "exchange", "0", str(notes)], 2, {}).wait()
    assert all(each.status == 0 for each in finished), finished
    found = [json.loads((notes / f"{rank}.json").read_text()) for rank in range(4)]
    per_host: dict[str, list[list[int]]] = {}
    for rank, note in enumerate(found):
        assert note["first"] == [f"from {other}" for other in range(4)]
        assert note["sizes"] == [6 + other * 600_000 for other in range(4)]
        assert (note["kind"], note["size"]) == (KINDS[launcher], 4)
        assert note["hosts"] == found[0]["hosts"]
        per_host.setdefault(note["hosts"][rank], []).append(note["local"])
    assert per_host == {"host-a": [[0, 2], [1, 2]], "host-b": [[0, 2], [1, 2]]}
