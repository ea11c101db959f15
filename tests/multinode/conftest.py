"""Hosts in network namespaces; the tests of this folder skip, with the reason, where there can be none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import hosts
from support.cluster import Cluster, MakeCluster
from support.helpers import Runner


@pytest.fixture
def make_cluster(runner: Runner) -> Iterator[MakeCluster]:
    """Makes hosts, with the arguments of `hosts.make_hosts`; fails the test if something is left in their shared memory."""
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    hosts.remove_leftovers()
    made: list[Cluster] = []
    with contextlib.ExitStack() as stack:

        def make(count: int, **link: float) -> Cluster:
            made.append(Cluster(runner, stack.enter_context(hosts.make_hosts(count, **link))))
            return made[-1]

        yield make
        left = [name for cluster in made for name in cluster.left_in_shared_memory()]
    assert not left, f"shared memory left behind: {left}"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The folder to which the ranks of bootstrap_job.py write."""
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder
