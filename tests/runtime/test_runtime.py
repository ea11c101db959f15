"""Task graphs of one's own on ranks of their own: order, launches chosen at run time, back-pressure, results."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from graph_job import ManySum
from ranks_in_process import run_ranks
from support import graphs

from distmk.abi import LaunchKind
from distmk.backends.build_cache import csrc_dir
from distmk.backends.host import build as host_build
from distmk.graph.graph import Graph
from distmk.program.program import compile_graph
from distmk.tasks import Affine

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("graph_job.py")


def run_job(tmp_path: Path, scenario: str, ranks: int, env: dict[str, str] | None = None, **options: Any) -> list[str]:
    """What every rank ended with."""
    argv = [sys.executable, str(JOB), scenario, json.dumps({"ranks": ranks, **options}), str(tmp_path)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("DISTMK_FAULT")}
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **(env or {})}
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=90)
    notes = [(tmp_path / str(rank)) for rank in range(ranks)]
    assert all(note.exists() for note in notes), done.stderr[-4000:]
    return [note.read_text() for note in notes]


def assert_done(notes: list[str]) -> None:
    assert set(notes) == {"done"}, notes


@pytest.mark.parametrize("threads", [False, True], ids=["riding", "threads"])
@pytest.mark.parametrize("workers", [1, 3])
def test_queues_in_order(tmp_path: Path, workers: int, threads: bool) -> None:
    assert_done(run_job(tmp_path, "queues", 2, workers=workers, iterations=100, threads=threads))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 4), (2, 2), (4, 1)])
def test_all_reduce_is_that_of_numpy(tmp_path: Path, ranks: int, workers: int) -> None:
    assert_done(run_job(tmp_path, "all_reduce", ranks, workers=workers, iterations=200))


def test_all_reduce_between_far_ranks(tmp_path: Path) -> None:
    """Virtual nodes of two ranks: within one by pointer, between them late and out of order."""
    env = {"DISTMK_FAULT_DELAY_PUTS": "500,2,3"}
    assert_done(run_job(tmp_path, "all_reduce", 4, env, workers=1, iterations=20))


def test_pipeline_of_thousands_of_iterations(tmp_path: Path) -> None:
    """Nothing but back-pressure between four ranks: the numbers arrive once each and in order."""
    assert_done(run_job(tmp_path, "pipeline", 4, iterations=3000))


@pytest.mark.parametrize("threads", [False, True], ids=["riding", "threads"])
@pytest.mark.parametrize(
    ("ranks", "workers", "schedulers", "instances"),
    [(1, 1, 1, 5), (2, 1, 1, 40), (2, 3, 3, 7), (1, 5, 2, 600)],
)
def test_launches_at_run_time(
    tmp_path: Path, ranks: int, workers: int, schedulers: int, instances: int, threads: bool
) -> None:
    options = {"workers": workers, "schedulers": schedulers, "instances": instances, "threads": threads}
    assert_done(run_job(tmp_path, "handed_out", ranks, iterations=60, **options))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 4)])
def test_attention_is_the_same_however_launched(tmp_path: Path, ranks: int, workers: int) -> None:
    assert_done(run_job(tmp_path, "attention_launches", ranks, workers=workers))


@pytest.mark.parametrize(("ranks", "workers", "schedulers"), [(1, 3, 1), (1, 2, 2), (2, 2, 1), (3, 1, 1)])
def test_schedulers_of_their_own(tmp_path: Path, ranks: int, workers: int, schedulers: int) -> None:
    assert_done(run_job(tmp_path, "own_schedulers", ranks, workers=workers, schedulers=schedulers, threads=True))


def test_session_refuses(tmp_path: Path) -> None:
    text = "UsageError: the graph is for 3 ranks, but 2 were started; start as many ranks as the graph has"
    assert run_job(tmp_path, "wrong_ranks", 2, graph_ranks=3) == [text, text]
    notes = run_job(tmp_path, "different_programs", 2)
    assert all(note.startswith("UsageError: ranks were given different program") for note in notes), notes
    assert_done(run_job(tmp_path, "views", 2))


# Which instances ran: the runtime with bodies that only count


class Counted(ManySum):
    """The bodies that count go through a share."""

    goes_through_shares: ClassVar[bool] = True


@functools.cache
def counting_tool() -> Path:
    """run_ranks with bodies that count."""
    sources = [path for path in host_build.host_sources() if "bodies" not in path.parts]
    sources += [csrc_dir() / "tools" / "run_ranks.cpp", Path(__file__).with_name("count_instances.cpp")]
    return host_build.build_sources("count_instances", "", ["-std=c++20", "-O1", "-pthread", "-Wall"], sources)


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


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--ride",),
        ("--cut", "3"),
        ("--cut", "1", "--ride"),
        ("--delay", "100,1,1"),
        ("--delay", "100,1,1", "--cut", "2"),
    ],
    ids=["threads", "riding", "cut", "cut-riding", "far", "cut-far"],
)
def test_every_instance_runs_once(options: tuple[str, ...], tmp_path: Path) -> None:
    """Also with more instances than a ring has room for, or fewer than workers share them out, and in the order of every
    worker's queue."""
    binary = counting_tool()
    for size in ((1, 1, 1, 3), (2, 3, 2, 300), (3, 2, 2, 4), (1, 4, 1, 50), (1, 17, 1, 1)):
        program = compile_graph(launches(*size))
        for part in program.ranks:
            part.header.jit_capacity = min(4, part.header.jit_capacity)
        done = run_ranks(binary, program, tmp_path, *options, iterations=25)
        assert done.returncode == 0, done.stdout
        found = re.search(r"(\d+) launches of (\d+) tasks, (\d+) wrong", done.stdout)
        assert found and [int(n) for n in found.groups()] == [size[0] * 20 * 25, size[0] * 20, 0], done.stdout


def test_counting_notices_a_wrong_launch(tmp_path: Path) -> None:
    """The test above can fail: a queue that skips a task."""
    program = compile_graph(graphs.all_reduce(1, 2))
    program.ranks[0].queues[0].begin += 1
    program.ranks[0].queues[0].count -= 1
    for desc in program.ranks[0].tasks:
        desc.num_waits = 0
    done = run_ranks(counting_tool(), program, tmp_path, iterations=1)
    assert "launches of 8 tasks" not in done.stdout, done.stdout
