"""The ring and the all-reduce of examples/ on three hosts, one rank each."""

from __future__ import annotations

import pytest
from support.cluster import LAUNCHERS, MakeCluster
from support.helpers import ROOT

pytestmark = pytest.mark.timeout(120)


def test_ring_and_all_reduce(make_cluster: MakeCluster) -> None:
    """The ring's number is right after 100 laps; the sum of random vectors is right on every rank."""
    cluster = make_cluster(3)
    ring = LAUNCHERS["mpirun"](cluster, [str(ROOT / "examples" / "ring.py")], 1, {}).wait()
    assert ring[0].status == 0 and "3 ranks on host, 100 laps: 600, expected 600" in ring[0].stdout, ring
    reduced = LAUNCHERS["srun"](cluster, [str(ROOT / "examples" / "allreduce.py")], 1, {}).wait()
    for rank, each in enumerate(reduced):
        assert each.status == 0 and f"rank {rank} on host: largest error" in each.stdout, each
