"""What the connections between ranks tell outside of collective calls: losses, launches that are given up, meeting places."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from support.yardstick import slowness

from distmk.bootstrap import link as link_module
from distmk.bootstrap.base import Launcher, Member, read_link_timeout_s
from distmk.bootstrap.link import MOST_BYTES, Link
from distmk.bootstrap.star import Star
from distmk.bootstrap.star_leaf import StarLeaf
from distmk.bootstrap.star_root import StarRoot
from distmk.errors import DistmkError, RankLostError, UsageError

pytestmark = pytest.mark.timeout(60)


def connected(tcp: bool) -> tuple[socket.socket, socket.socket]:
    if not tcp:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@contextmanager
def stars(num_ranks: int, tcp: bool = False, timeout_s: float = 5) -> Iterator[list[Star]]:
    """A star whose ranks are in this process."""
    pairs = {rank: connected(tcp) for rank in range(1, num_ranks)}
    links = {rank: Link(root, timeout_s) for rank, (root, _) in pairs.items()}
    made: list[Star] = [StarRoot(Member("torch", 0, num_ranks), links, b"", timeout_s, Launcher())]
    for rank, (_, leaf) in pairs.items():
        link = {0: Link(leaf, timeout_s)}
        made.append(StarLeaf(Member("torch", rank, num_ranks), link, b"", timeout_s, Launcher()))
    with ExitStack() as stack:
        for star in made:
            stack.callback(star.close)
        yield made


def eventually(condition: Callable[[], bool], timeout_s: float = 3) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def kill(star: Star) -> None:
    """End the connections of a rank as its death would."""
    for link in star.links():
        link._sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_killed_rank_is_named_on_every_rank(tcp: bool) -> None:
    with stars(4, tcp) as ranks:
        assert [star.lost_ranks() for star in ranks] == [[]] * 4
        ranks[1]._links[0].send(b"g", b"early")  # a collective call that rank 0 has not reached yet
        kill(ranks[2])
        for rank in (0, 1, 3):
            assert eventually(lambda star=ranks[rank]: star.lost_ranks() == [2])
            assert ranks[rank].loss == "rank 2 left or died"
            with pytest.raises(RankLostError, match=r"^rank 2 left or died$"):
                ranks[rank].allgather(b"")
        assert list(ranks[0]._links[1].inbox) == [(b"g", b"early")]


def test_ranks_that_die_together_are_named_together() -> None:
    with stars(4) as ranks:
        kill(ranks[1])
        kill(ranks[3])
        for rank in (0, 2):
            assert eventually(lambda star=ranks[rank]: star.lost_ranks() == [1, 3])
            assert ranks[rank].loss == "ranks 1, 3 left or died"


def test_a_host_that_does_not_answer_is_lost_with_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ranks of a host that is cut off lose rank 0's host. The silence is faked: tests/multinode cuts real cables."""
    with stars(4, tcp=True) as ranks:
        for star in ranks:
            star.hostnames = star.host_ids = ["a", "a", "b", "b"]
        assert [star.lost_ranks() for star in ranks] == [[]] * 4
        silent = {ranks[0]._links[3]._sock, ranks[2]._links[0]._sock}
        monkeypatch.setattr(link_module, "is_unanswered", lambda sock, timeout_s: timeout_s == 10 and sock in silent)
        with pytest.raises(RankLostError, match="ranks 0, 1 on a were lost"):
            ranks[2].barrier()
        for rank in (0, 1):
            assert eventually(lambda star=ranks[rank]: star.lost_ranks() == [2, 3])
            assert ranks[rank].loss == "ranks 2, 3 on b were lost: no answer over the network for 10 s"
            with pytest.raises(RankLostError, match="ranks 2, 3 on b were lost"):
                ranks[rank].barrier()


def test_rank_0_is_lost() -> None:
    with stars(3) as ranks:
        kill(ranks[0])
        for star in ranks[1:]:
            assert eventually(lambda star=star: star.lost_ranks() == [0])
            assert star.loss == "rank 0 left or died"


def test_an_abort_reaches_all_ranks_and_no_other_launch() -> None:
    with stars(4) as ranks:
        ranks[2]._links[0].send(b"g", b"the next collective call")
        ranks[1].send_abort(7, 3)
        assert all(eventually(lambda star=star: star.abort_reason(7) == 3) for star in ranks)
        assert not any(star.abort_reason(8) for star in ranks)
        ranks[0].send_abort(9, 1)
        assert all(eventually(lambda star=star: star.abort_reason(9) == 1) for star in ranks)
        assert not any(star.abort_reason(10) or star._notices.aborts for star in ranks)  # none of past launches
        assert all(star.lost_ranks() == [] for star in ranks)
        assert list(ranks[0]._links[2].inbox) == [(b"g", b"the next collective call")]


def test_meeting_places() -> None:
    """Ranks meet in any order of places, while nobody is in a collective call."""
    with stars(3) as ranks, ThreadPoolExecutor(3) as pool:
        met = [pool.submit(star.meet, "here", 3) for star in ranks]
        assert [each.result() for each in met] == [True] * 3
        assert not ranks[0].meet("alone", 0.05)
        kill(ranks[2])
        met = [pool.submit(star.meet, "there", 30) for star in ranks[:2]]
        assert [each.result(5) for each in met] == [False] * 2


def test_telling_does_not_wait_for_a_rank_that_does_not_read() -> None:
    with stars(3, timeout_s=1) as ranks:
        began = time.monotonic()
        for launch in range(20_000):
            ranks[0].send_abort(launch, 1)
        assert time.monotonic() - began < 5 * slowness()
        assert ranks[0]._links[1]._unsent  # more than the socket holds
        for star in ranks[1:]:
            # What could not be sent follows whole, in order.
            assert eventually(lambda star=star: ranks[0].lost_ranks() == [] and star.abort_reason(19_999) == 1)


def test_a_rank_that_does_not_read_is_named() -> None:
    with (
        stars(3, timeout_s=0.3) as ranks,
        pytest.raises(RankLostError, match="rank 1 did not read from rank 0 within"),
    ):
        ranks[0].broadcast(bytes(8 << 20))


def test_large_messages_both_ways() -> None:
    with stars(3, tcp=True) as ranks, ThreadPoolExecutor(3) as pool:
        parts = [bytes([rank]) * (3_000_000 * rank) for rank in range(3)]
        gathered = [pool.submit(star.allgather, part) for star, part in zip(ranks, parts, strict=True)]
        assert all(each.result() == parts for each in gathered)


@pytest.mark.parametrize(
    "frame", [struct.pack("<Qc", MOST_BYTES + 1, b"g"), struct.pack("<Qc", 2, b"x") + b"[]", b"\xff" * 9]
)
def test_a_frame_that_makes_no_sense_ends_the_job_and_names_its_sender(frame: bytes) -> None:
    """A length is checked before anything is allocated."""
    with stars(3) as ranks:
        ranks[1]._links[0]._sock.sendall(frame)
        with pytest.raises(RankLostError, match="rank 1 sent no valid"):
            ranks[0].allgather(b"")
        assert eventually(lambda: ranks[2].lost_ranks() == [1])


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_BYTES", 1000)
    with stars(2) as ranks, pytest.raises(DistmkError, match="too large to send"):
        ranks[0].broadcast(bytes(1001))


def test_a_process_that_does_not_read_is_not_taken_for_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel answers, even when it takes no more data."""
    monkeypatch.setenv("DISTMK_LINK_TIMEOUT_S", "0.4")
    with stars(2, tcp=True) as ranks:
        ranks[0]._links[1].post(b"b", bytes(16 << 20))
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert ranks[0].lost_ranks() == []
            time.sleep(0.05)
        assert ranks[0]._links[1]._unsent
        received = threading.Thread(target=lambda: ranks[1].broadcast())
        received.start()
        assert eventually(lambda: ranks[0].lost_ranks() == [] and not ranks[0]._links[1]._unsent)
        received.join()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e300"])
def test_link_timeout_must_be_a_positive_number(text: str) -> None:
    with pytest.raises(UsageError, match="DISTMK_LINK_TIMEOUT_S must be a positive number of seconds"):
        read_link_timeout_s({"DISTMK_LINK_TIMEOUT_S": text})
    assert read_link_timeout_s({}) == 10
