"""The way from a launcher's introduction to the star: rank 0's addresses, and connections to the right one."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from distmk.bootstrap import rendezvous
from distmk.bootstrap.base import Bootstrap, Member
from distmk.bootstrap.rendezvous import join_star, own_hosts
from distmk.errors import RankLostError

pytestmark = pytest.mark.timeout(60)

Edit = Callable[[dict[str, Any]], None]


def join_two(hosts: list[str], edit: Edit = lambda address: None, local_size: int | None = None) -> list[Any]:
    """Join two ranks in two threads; the result is each rank's star or its error. `edit` changes the address on its way."""
    address: queue.Queue[bytes] = queue.Queue()
    ended: list[Any] = [None, None]

    def introduce(payload: bytes | None) -> bytes:
        if payload is None:
            return address.get(timeout=10)
        told = json.loads(payload)
        edit(told)
        address.put(json.dumps(told).encode())
        return payload

    def join(rank: int) -> None:
        try:
            ended[rank] = join_star(Member("mpi", rank, 2, None, local_size), introduce, hosts, timeout_s=2)
        except RankLostError as error:
            ended[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def check_exchange(stars: list[Bootstrap]) -> None:
    received: list[bytes] = []
    other = threading.Thread(target=lambda: received.extend(stars[1].allgather(b"b")))
    other.start()
    assert stars[0].allgather(b"a") == [b"a", b"b"]
    other.join()
    assert received == [b"a", b"b"]
    for star in stars:
        assert star.hostnames == [socket.gethostname()] * 2
        assert (star.local_rank, star.local_size) == (star.rank, 2)
        star.close()


def test_addresses_that_do_not_lead_to_rank_0_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not resolve, and another program that listens and says nothing."""
    real = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
            return real(stranger.getsockname() if address[0] == "stranger" else address, timeout)

        monkeypatch.setattr(rendezvous.socket, "create_connection", create_connection)
        monkeypatch.setattr(rendezvous, "_ATTEMPT_S", 0.3)
        check_exchange(join_two(["no-such-host.invalid", "stranger", "127.0.0.1"]))


def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    told: list[dict[str, Any]] = []
    check_exchange(join_two(["no-such-host.invalid"], told.append, local_size=2))
    assert told[0]["hosts"] == ["127.0.0.1"]


def test_no_address_leads_to_rank_0() -> None:
    def edit(address: dict[str, Any]) -> None:
        address["port"] = 1

    started = time.monotonic()
    hub, spoke = join_two(["no-such-host.invalid", "127.0.0.1"], edit)
    assert time.monotonic() - started < 20
    assert str(hub) == "rank 1 did not join rank 0 within 2 s"
    assert str(spoke).startswith("rank 1 cannot reach rank 0 at no-such-host.invalid port 1: ")
    assert str(spoke).endswith("; nor at 127.0.0.1 port 1: Connection refused")


def test_wrong_key_is_refused() -> None:
    def edit(address: dict[str, Any]) -> None:
        address["authkey"] = "00" * 32

    hub, spoke = join_two(["127.0.0.1"], edit)
    assert str(hub) == "rank 1 did not join rank 0 within 2 s"
    assert "rank 0 did not let rank 1 join" in str(spoke)


def test_own_hosts() -> None:
    name, *addresses = own_hosts()
    assert name == socket.gethostname()
    for address in addresses:
        assert socket.inet_aton(address) and not address.startswith("127.")
