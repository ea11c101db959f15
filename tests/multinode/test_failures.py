"""A host that is cut off or dies ends the ranks of the others in time, with its ranks named."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.cluster import LAUNCHERS, MakeCluster
from support.faults import errors, generate_command, wait_for_tokens

pytestmark = pytest.mark.timeout(120)

LINK_TIMEOUT_S = 3.0
LOST = 4  # exit status


@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_lost_host_is_named(how: str, make_cluster: MakeCluster, endless: Path) -> None:
    """Two ranks a host. Those of the first host name the ranks of the second; those that are cut off, the first's."""
    cluster = make_cluster(2)
    variables = {"DISTMK_LINK_TIMEOUT_S": str(LINK_TIMEOUT_S)}
    job = LAUNCHERS["srun"](cluster, generate_command(endless, "--workers", "2")[1:], 2, variables)
    wait_for_tokens(job.processes[0])
    began = time.monotonic()
    cluster.hosts[1].cut() if how == "cut" else cluster.hosts[1].kill()
    finished = job.wait()
    took_s = time.monotonic() - began
    why = "left or died" if how == "kill" else "lost: no answer over the network for 3 s"
    for rank, each in enumerate(finished):
        if how == "kill" and rank >= 2:
            assert each.status == -9
            continue
        lines = errors(each)
        assert (each.status, len(lines)) == (LOST, 1), (rank, each)
        ranks = "2, 3" if rank < 2 else "0, 1"
        assert re.match(f"distmk: ranks {ranks} (on host-. were )?{why}$", lines[0]), (rank, lines)
    assert took_s < LINK_TIMEOUT_S + 8, f"the others ended after {took_s:.1f} s"
