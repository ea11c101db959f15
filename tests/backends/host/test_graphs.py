"""Task graphs on ranks that are processes: order, launches chosen at run time, back-pressure, results."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.graph_runs import assert_done, run_job

pytestmark = pytest.mark.timeout(120)


@pytest.mark.whole
@pytest.mark.parametrize(("workers", "threads"), [(1, True), (3, False)], ids=["1-threads", "3-riding"])
def test_queues_in_order(tmp_path: Path, workers: int, threads: bool) -> None:
    assert_done(run_job(tmp_path, "queues", 2, workers=workers, iterations=100, threads=threads))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 4), (2, 2), (4, 1)])
def test_all_reduce_is_that_of_numpy(tmp_path: Path, ranks: int, workers: int) -> None:
    assert_done(run_job(tmp_path, "all_reduce", ranks, workers=workers, iterations=200))


@pytest.mark.whole
def test_all_reduce_between_far_ranks(tmp_path: Path) -> None:
    """Virtual nodes of two ranks: within one by pointer, between them late and out of order."""
    env = {"DISTMK_FAULT_DELAY_PUTS": "500,2,3"}
    assert_done(run_job(tmp_path, "all_reduce", 4, env, workers=1, iterations=20))


@pytest.mark.whole
def test_pipeline_of_thousands_of_iterations(tmp_path: Path) -> None:
    """Only back-pressure between four ranks: every number arrives once and in order."""
    assert_done(run_job(tmp_path, "pipeline", 4, iterations=3000))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("ranks", "workers", "schedulers", "instances", "threads"),
    [(1, 1, 1, 5, True), (2, 1, 1, 40, False), (2, 3, 3, 7, True), (1, 5, 2, 600, False), (1, 5, 2, 600, True)],
)
def test_launches_at_run_time(
    tmp_path: Path, ranks: int, workers: int, schedulers: int, instances: int, threads: bool
) -> None:
    options = {"workers": workers, "schedulers": schedulers, "instances": instances, "threads": threads}
    assert_done(run_job(tmp_path, "handed_out", ranks, iterations=60, **options))


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 2), (3, 1)])
def test_attention_is_the_same_however_launched(tmp_path: Path, ranks: int, workers: int) -> None:
    assert_done(run_job(tmp_path, "attention_launches", ranks, workers=workers))


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "workers", "schedulers"), [(1, 3, 1), (1, 2, 2), (2, 2, 1)])
def test_schedulers_of_their_own(tmp_path: Path, ranks: int, workers: int, schedulers: int) -> None:
    assert_done(run_job(tmp_path, "own_schedulers", ranks, workers=workers, schedulers=schedulers, threads=True))


@pytest.mark.whole
def test_session_refuses(tmp_path: Path) -> None:
    text = "UsageError: the graph is for 3 ranks, but 2 were started; start as many ranks as the graph has"
    assert run_job(tmp_path, "wrong_ranks", 2, graph_ranks=3) == [text, text]
    notes = run_job(tmp_path, "different_programs", 2)
    assert all(note.startswith("UsageError: ranks were given different program") for note in notes), notes
    assert_done(run_job(tmp_path, "views", 2))
