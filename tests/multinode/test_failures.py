"""A host that is cut off or dies ends the ranks of the others in time, with its ranks named."""

from __future__ import annotations

import time

import pytest
from conftest import MakeCluster
from support.cluster import LAUNCHERS, Cluster
from support.helpers import ROOT, Finished

pytestmark = pytest.mark.timeout(120)

RING = [str(ROOT / "examples" / "ring.py"), "--laps", str(10**9)]
LINK_TIMEOUT_S = 3.0
LOST = 4  # exit status


def start_ring(cluster: Cluster, per_host: int) -> object:
    """The ring without end, two ranks a host, started as srun does; returns once every rank has heaps of its own."""
    wait = LAUNCHERS["srun"](cluster, RING, per_host, {"DISTMK_LINK_TIMEOUT_S": str(LINK_TIMEOUT_S)})
    time.sleep(6)
    return wait


@pytest.mark.parametrize("how", ["cut", "kill"])
def test_lost_host_is_named(how: str, make_cluster: MakeCluster) -> None:
    """Two ranks a host. Those of the first host name the ranks of the second; those that are cut off name rank 0."""
    cluster = make_cluster(2)
    wait = start_ring(cluster, 2)
    began = time.monotonic()
    cluster.hosts[1].cut() if how == "cut" else cluster.hosts[1].kill()
    finished: list[Finished] = wait()  # type: ignore[operator]
    took_s = time.monotonic() - began
    for rank, each in enumerate(finished):
        if how == "kill" and rank >= 2:
            assert each.status == -9
            continue
        assert "Traceback" not in each.stderr, each.stderr
        assert each.status == LOST, (rank, each)
        named = "2, 3" if rank < 2 else "0"
        assert named in each.stderr.splitlines()[-1], (rank, each.stderr)
    assert took_s < LINK_TIMEOUT_S + 8, f"the others ended after {took_s:.1f} s"
