"""Ranks started by rank 0: they join, agree, and notice that one is gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from bootstrap_runs import Job, check_exchange

from distmk.bootstrap import agree, agree_same, connect
from distmk.bootstrap.messages import pack, unpack
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)


# One rank


def test_single() -> None:
    with connect(env={}) as bootstrap:
        assert (bootstrap.kind, bootstrap.rank, bootstrap.world_size) == ("single", 0, 1)
        assert bootstrap.allgather(b"a") == [b"a"]
        assert bootstrap.broadcast(b"b") == b"b"
        bootstrap.barrier()
        assert agree(bootstrap, lambda: 5) == 5
        agree_same(bootstrap, "models", {"--model": "a"})

        def fail() -> None:
            raise UsageError("wrong")

        with pytest.raises(UsageError, match=r"^wrong$"):
            agree(bootstrap, fail)
    bootstrap.close()
    with pytest.raises(RuntimeError, match="closed"):
        bootstrap.allgather(b"")


def test_pack_is_undone_by_unpack() -> None:
    for parts in ([], [b""], [b"a", b"", b"x" * 1000]):
        assert unpack(pack(parts), "rank 1", len(parts)) == parts


# Ranks that rank 0 starts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_local_exchange(job: Job, num_ranks: int) -> None:
    done = job.run("exchange", num_ranks)
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "local", num_ranks)
    assert done.stdout.splitlines() == ["stdout of rank 0"]
    for rank in range(1, num_ranks):
        assert f"stdout of rank {rank}" in done.stderr


def test_local_started_by_a_thread_that_ends(job: Job) -> None:
    done = job.run("short_thread", 3)
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "local", 3)


def test_agree_when_some_ranks_fail(job: Job) -> None:
    job.run("one_fails", 3)
    notes = job.notes()
    assert {note["type"] for note in notes.values()} == {"ModelError"}
    assert {note["code"] for note in notes.values()} == {2}
    assert notes["0"]["text"] == "rank 1: no config.json on 1"
    assert notes["1"]["text"] == "no config.json on 1"
    assert notes["2"]["text"] == "no config.json on 2"


def test_agree_when_all_ranks_fail(job: Job) -> None:
    job.run("all_fail", 3)
    assert [note["text"] for note in job.notes().values()] == ["no config.json"] * 3


def test_agree_tells_of_bugs(job: Job) -> None:
    job.run("bug", 3)
    notes = job.notes()
    assert notes["1"]["type"] == "KeyError"
    for rank in ("0", "2"):
        assert notes[rank]["text"] == "rank 1: unexpected KeyError: 'key'"


def test_agree_same(job: Job) -> None:
    job.run("same", 3)
    notes = job.notes()
    assert len(notes) == 3
    for note in notes.values():
        assert note["type"] == "UsageError"
        assert note["text"] == (
            "ranks were given different models: --model: rank 2 differs from rank 0 ('b' on rank 2, 'a' on rank 0); "
            "start every rank with the same --model"
        )


@pytest.mark.parametrize("scenario", ["follower_killed", "follower_killed_at_command"])
def test_killed_follower_is_named_on_every_rank(job: Job, scenario: str) -> None:
    job.run(scenario, 4)
    notes = job.notes()
    assert sorted(notes) == ["0", "1", "3"]
    for note in notes.values():
        assert note["type"] == "RankLostError"
        assert note["text"].startswith("rank 2 (pid ") and note["text"].endswith("was killed by SIGKILL")
        assert note["again"] == note["text"]


def test_killed_rank_0_ends_the_others(job: Job) -> None:
    done = job.run("hub_killed", 4)
    assert done.status == -signal.SIGKILL
    wait_until(lambda: {"1", "2"} <= set(job.notes()))
    notes = job.notes()
    assert sorted(notes) == ["1", "2"]  # rank 3 slept, and the kernel killed it
    for note in notes.values():
        assert (note["type"], note["text"]) == ("RankLostError", "rank 0 left or died")


def test_follower_that_exits_before_it_joins(job: Job) -> None:
    done = job.run("exit_early", 4)
    assert done.status == 4
    text = job.notes()["error0"]["text"]
    assert text.startswith("rank 2 (pid ") and text.endswith("exited with status 7")


def test_silent_follower_is_named_after_the_timeout(job: Job) -> None:
    start = time.monotonic()
    job.run("silent", 3, DISTMK_BOOTSTRAP_TIMEOUT_S="2")
    assert time.monotonic() - start < 30  # rank 1 sleeps on, and is terminated
    notes = job.notes()
    assert sorted(notes) == ["0", "2"]
    for note in notes.values():
        assert note["text"] == "rank 1 did not answer rank 0 within 2 s"


def test_close_kills_a_follower_that_will_not_leave(job: Job) -> None:
    done = job.run("stubborn", 3)
    assert done.status == 0, done.stderr
    assert job.notes()["0"]["close_s"] < 8


def test_close_lets_followers_finish(job: Job) -> None:
    job.run("slow_to_leave", 3)
    assert sorted(job.notes()) == ["1", "2"]


def test_ctrl_c_leaves_the_followers_alone(job: Job) -> None:
    done = job.run("interrupted", 3)
    assert done.status == 0, done.stderr
    assert [note["gathered"] for note in job.notes().values()] == [3, 3, 3]


def test_fork_of_rank_0_does_not_end_the_job(job: Job) -> None:
    done = job.run("forked", 2)
    assert done.status == 0, done.stderr
    assert [note["gathered"] for note in job.notes().values()] == [2, 2]


def test_abort_ends_followers_at_once(job: Job) -> None:
    start = time.monotonic()
    job.run("aborted", 3)
    assert time.monotonic() - start < 20


def test_program_that_cannot_be_started() -> None:
    with pytest.raises(UsageError, match="cannot start /no/such/program: No such file"):
        connect(2, follower_argv=["/no/such/program"], env={})


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
