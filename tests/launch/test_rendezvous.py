"""The way from a launcher's introduction to the star: rank 0's addresses, and connections to the right one."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.yardstick import slowness

from distmk.bootstrap import rendezvous
from distmk.bootstrap.base import Bootstrap, Member
from distmk.bootstrap.keys import read_authkey
from distmk.bootstrap.rendezvous import Introducer, join_star, own_hosts
from distmk.errors import DistmkError, UsageError

pytestmark = pytest.mark.timeout(60)

Edit = Callable[[dict[str, Any]], None]


def join_two(
    hosts: list[str],
    edit: Edit = lambda address: None,
    local_size: int | None = None,
    is_private: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Join two ranks in two threads; the result is each rank's star or its error. `edit` changes the address on its way."""
    env = env or {}
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
            member = Member("mpi", rank, 2, None, local_size)
            ended[rank] = join_star(member, Introducer(introduce, is_private), hosts, 2, env=env)
        except DistmkError as error:
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
        check_exchange(join_two(["no-such-host.invalid", "stranger", "127.0.0.7"]))


def test_ranks_of_one_host_listen_on_no_network() -> None:
    told: list[dict[str, Any]] = []
    check_exchange(join_two(["no-such-host.invalid"], told.append, local_size=2))
    assert told[0]["unix"] and not told[0]["hosts"]


@pytest.mark.parametrize("env", [{}, {"DISTMK_AUTHKEY": "5a" * 32}])
def test_a_store_that_others_read_carries_no_key(env: dict[str, str]) -> None:
    """Nor an address, unless the user gave a key: then without one only a Unix socket is offered."""
    told: list[dict[str, Any]] = []
    check_exchange(join_two(["127.0.0.7"], told.append, is_private=False, env=env))
    assert told[0]["authkey"] == "" and bool(told[0]["unix"]) is not bool(env)


def test_ranks_on_another_host_need_a_key() -> None:
    def edit(address: dict[str, Any]) -> None:
        address["unix"] = "a-socket-of-another-host"

    _, leaf = join_two(["127.0.0.7"], edit, is_private=False)
    assert "on another host; ranks on several hosts need a key" in str(leaf)


def test_ranks_known_to_be_on_several_hosts_need_a_key_at_once() -> None:
    """Both are told: rank 0 does not wait for a rank that cannot come."""
    started = time.monotonic()
    for error in join_two(["127.0.0.7"], local_size=1, is_private=False):
        assert isinstance(error, UsageError)
        assert "ranks on several hosts need a key" in str(error) and "secrets.token_hex(32)" in str(error)
    assert time.monotonic() - started < slowness()


def test_ranks_without_a_key_meet_only_where_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[dict[str, Any]] = []
    env = {"DISTMK_UNAUTHENTICATED_BIND": "127.0.0.5"}
    check_exchange(join_two(["127.0.0.7"], told.append, is_private=False, env=env))
    assert told[0]["hosts"] == ["127.0.0.5"] and not told[0]["authkey"]
    assert "whoever reaches 127.0.0.5 can join" in capsys.readouterr().err
    root, leaf = join_two(["127.0.0.7"], is_private=False, env={"DISTMK_UNAUTHENTICATED_BIND": "192.0.2.1"})
    assert isinstance(root, UsageError) and "192.0.2.1 is no address of this host" in str(root)
    assert isinstance(leaf, DistmkError)


def test_a_key_is_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("5a" * 32 + "\n")
    named = {"DISTMK_AUTHKEY_FILE": str(path)}
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_authkey(named)
    path.chmod(0o600)
    assert read_authkey(named) == bytes.fromhex("5a" * 32)
    os.mkfifo(tmp_path / "fifo", 0o600)
    empty = tmp_path / "empty"
    empty.touch(0o600)
    for env, text in (
        ({"DISTMK_AUTHKEY_FILE": str(tmp_path / "fifo")}, "is a FIFO; a regular file"),
        ({"DISTMK_AUTHKEY_FILE": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"DISTMK_AUTHKEY_FILE": str(tmp_path)}, "is a folder; a regular file"),
        ({"DISTMK_AUTHKEY_FILE": str(empty)}, "32 hexadecimal digits or more"),
        ({"DISTMK_AUTHKEY": "12ab"}, "32 hexadecimal digits or more"),
        ({"DISTMK_AUTHKEY": "not hexadecimal at all, but long enough"}, "32 hexadecimal digits or more"),
    ):
        with pytest.raises(UsageError, match=text):
            read_authkey(env)
    assert read_authkey({}) is None


def test_no_address_leads_to_rank_0() -> None:
    def edit(address: dict[str, Any]) -> None:
        address["port"] = 1

    started = time.monotonic()
    root, leaf = join_two(["no-such-host.invalid", "127.0.0.7"], edit)
    assert time.monotonic() - started < 20
    assert str(root) == "rank 1 did not join within 2 s"
    assert str(leaf).startswith("rank 1 cannot reach rank 0 at no-such-host.invalid port 1: ")
    assert str(leaf).endswith("; nor at 127.0.0.7 port 1: Connection refused")


def test_wrong_key_is_refused() -> None:
    def edit(address: dict[str, Any]) -> None:
        address["authkey"] = "00" * 32

    root, leaf = join_two(["127.0.0.7"], edit)
    assert str(root) == "rank 1 did not join within 2 s; refused for another key or user: 1"
    assert "rank 0 did not let rank 1 join" in str(leaf)


def test_own_hosts() -> None:
    name, *addresses = own_hosts()
    assert name == socket.gethostname()
    for address in addresses:
        assert socket.inet_aton(address) and not address.startswith("127.")
