"""Every instance of a launched task runs exactly once: the runtime with bodies that only count."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import ClassVar

import pytest
from support import graphs
from support.graph_job import ManySum
from support.ranks_in_process import build_in_one, run_ranks

from distmk.abi import LaunchKind
from distmk.backends.build_cache import csrc_dir
from distmk.backends.host import build as host_build
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph
from distmk.tasks import Affine

pytestmark = pytest.mark.timeout(120)


class Counted(ManySum):
    """A sum whose body, which only counts, runs all instances of a worker's share."""

    loops_over_instances: ClassVar[bool] = True


@functools.cache
def counting_tool() -> Path:
    """run_ranks linked with count_instances.cpp in place of the bodies."""
    sources = [path for path in host_build.host_sources() if path.parent.name != "bodies"]
    sources += [csrc_dir() / "tools" / "run_ranks.cpp", Path(__file__).with_name("count_instances.cpp")]
    return build_in_one("count_instances", ["-std=c++20", "-O1", "-pthread", "-Wall"], sources)


def launches(num_ranks: int, num_workers: int, num_schedulers: int, instances: int) -> Graph:
    graph = Graph(num_ranks, num_workers, num_schedulers)
    one = graph.buffer("one", 1)
    ahead, single, massive, spread = LaunchKind.AHEAD, LaunchKind.SINGLE, LaunchKind.MASSIVE, LaunchKind.SPREAD
    kinds = (massive, ahead, single, massive, single, spread, ahead, spread, spread, massive)
    for rank in range(num_ranks):
        for number, kind in enumerate(kinds):
            dst = graph.buffer(f"dst{number}.{rank}", 1)
            times = instances * (number + 1) if kind in (massive, spread) else 1
            blocks = (one.at(rank),)
            graph.add(Counted(rank, f"t{number}", launch=kind, blocks=blocks, dst=dst.at(rank), instances=times))
            graph.add(Affine(rank, f"use{number}", src=dst.at(rank), dst=dst.at(rank)))
    return graph


SIZES = [(1, 1, 1, 3), (2, 3, 2, 300), (3, 2, 2, 4), (1, 4, 1, 50), (1, 17, 1, 1)]


OPTIONS = {
    "threads": (),
    "riding": ("--ride",),
    "cut": ("--cut", "3"),
    "cut-riding": ("--cut", "1", "--ride"),
    "far": ("--delay", "100,1,1"),
    "cut-far": ("--delay", "100,1,1", "--cut", "2"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", OPTIONS)
def test_every_instance_runs_once(name: str, tmp_path: Path) -> None:
    """This holds with more instances than a ring has entries or fewer than workers, and in the order of every worker's
    queue. Each of the options has two of the sizes, in turn.
    """
    binary, options, number = counting_tool(), OPTIONS[name], list(OPTIONS).index(name)
    for size in (SIZES[number % len(SIZES)], SIZES[(number + 2) % len(SIZES)]):
        program = compile_graph(launches(*size))
        for part in program.ranks:
            part.header.jit_capacity = min(4, part.header.jit_capacity)
        done = run_ranks(binary, program, tmp_path, *options, iterations=25)
        assert done.returncode == 0, done.stdout
        found = re.search(r"(\d+) launches of (\d+) tasks, (\d+) wrong", done.stdout)
        assert found and [int(n) for n in found.groups()] == [size[0] * 20 * 25, size[0] * 20, 0], done.stdout


def test_counting_notices_a_wrong_launch(tmp_path: Path) -> None:
    """The test above fails if a queue skips a task."""
    program = compile_graph(graphs.all_reduce(1, 2))
    program.ranks[0].queues[0].begin += 1
    program.ranks[0].queues[0].count -= 1
    for desc in program.ranks[0].tasks:
        desc.num_waits = 0
    done = run_ranks(counting_tool(), program, tmp_path, iterations=1)
    assert "launches of 8 tasks" not in done.stdout, done.stdout
