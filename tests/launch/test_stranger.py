"""Somebody else on the network, or on this machine, who reads the launcher's store and connects: nothing of theirs runs."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bootstrap_runs import JOB, Job
from bootstrap_runs import check_exchange as check_notes
from support.yardstick import slowness
from test_messages import Bomb
from test_rendezvous import check_exchange, join_two

from distmk.bootstrap import torchrun
from distmk.bootstrap.handshake import Refused, check_same_user
from distmk.bootstrap.link import MOST_BYTES
from distmk.bootstrap.rendezvous import Route, listen_unix
from distmk.errors import DistmkError

pytestmark = pytest.mark.timeout(120)

KEY = "5a" * 32
NOBODY = 65534


def attack(connect: Any, marker: Path) -> list[socket.socket]:
    """Connections that send what a stranger may: a pickle as a frame, garbage, a huge length, nothing."""
    bomb = pickle.dumps(Bomb(marker))
    sent = [
        bomb,
        struct.pack("!i", len(bomb)) + bomb,  # as multiprocessing frames it
        struct.pack("!iQ", -1, 1 << 62),
        b"g" + struct.pack("<Q", MOST_BYTES),
        b"\x00" * 68,
        b"\xff" * 1_000,
        b"GET / HTTP/1.1\r\n\r\n",
        *[b""] * 100,
    ]
    opened = []
    for each in sent:
        opened.append(connect())
        opened[-1].settimeout(10)
        opened[-1].sendall(each)
    return opened


def check_turned_away(opened: list[socket.socket]) -> None:
    """Each got a greeting, perhaps a refusal, and the end of the connection."""
    for sock in opened:
        with sock:
            received = b""
            try:
                while arrived := sock.recv(4096):
                    received += arrived
            except ConnectionResetError:
                pass
            assert len(received) <= 40 + 32 and KEY.encode() not in received


@pytest.mark.parametrize("one_host", [True, False])
def test_strangers_do_not_hold_up_the_ranks(tmp_path: Path, one_host: bool) -> None:
    marker = tmp_path / "executed"
    opened: list[socket.socket] = []

    def tell_stranger(address: dict[str, Any]) -> None:
        def connect() -> socket.socket:
            if one_host:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect("\0" + address["unix"])
                return sock
            return socket.create_connection(("127.0.0.1", address["port"]))

        assert KEY not in json.dumps(address) and not address["authkey"]
        opened.extend(attack(connect, marker))

    started = time.monotonic()
    env = {} if one_host else {"DISTMK_AUTHKEY": KEY}
    stars = join_two(["127.0.0.7"], tell_stranger, is_private=False, env=env)
    assert time.monotonic() - started < 2 * slowness()
    check_turned_away(opened)
    assert stars[0].authkey == stars[1].authkey and len(stars[0].authkey) == 32
    check_exchange(stars)
    assert not marker.exists()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Connect and listen as another user: the kernel notes the effective user when a socket does so."""
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_another_user_neither_joins_nor_takes_the_place_of_rank_0() -> None:
    with listen_unix() as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        with as_nobody():
            stranger.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted, pytest.raises(Refused, match="another user"):
            check_same_user(accepted)

    with as_nobody():
        impostor = listen_unix()

    def lead_astray(address: dict[str, Any]) -> None:
        address["unix"] = impostor.getsockname()[1:].decode()

    with impostor:
        root, leaf = join_two(["127.0.0.7"], lead_astray, is_private=False)
    assert "rank 0 did not let rank 1 join: another user listens there" in str(leaf)
    assert str(root) == "rank 1 did not join within 2 s"


def test_an_impostor_without_the_key_is_not_rank_0() -> None:
    """It answers as rank 0 would, but cannot prove that it knows the key; it learns nothing about the key either."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(b"distmk1\n" + b"n" * 32)
                heard.append(sock.recv(4096))
                sock.sendall(b"p" * 32)

        thread = threading.Thread(target=answer)
        thread.start()

        def lead_astray(address: dict[str, Any]) -> None:
            address["hosts"], address["port"] = ["127.0.0.1"], impostor.getsockname()[1]

        _, leaf = join_two(["127.0.0.7"], lead_astray, is_private=False, env={"DISTMK_AUTHKEY": KEY})
        thread.join()
    assert "it has another key" in str(leaf)
    assert len(heard[0]) == 68 and bytes.fromhex(KEY) not in heard[0]


@pytest.mark.parametrize(
    "told",
    [
        {"hosts": ["\x1b[31m"]},
        {"hosts": "127.0.0.1"},
        {"hosts": [["127.0.0.1"]]},
        {"port": 70000},
        {"port": "1"},
        {"unix": "a\0b"},
        {"unix": "x" * 500},
        {"authkey": "zz"},
        {"another": 1},
    ],
)
def test_an_address_that_makes_no_sense_is_one_line(told: dict[str, Any]) -> None:
    good = json.loads(Route("name", ("a.b", "::1"), 1, "00").encode())
    assert Route.decode(json.dumps(good).encode()) == Route("name", ("a.b", "::1"), 1, "00")
    for payload in (json.dumps(good | told).encode(), b"[" * 100_000, b"\xff", b""):
        with pytest.raises(DistmkError) as caught:
            Route.decode(payload)
        assert str(caught.value) == (
            "the launcher sent no valid address of rank 0; start the same version of distmk on every rank"
        )


def test_stranger_at_the_store_of_torchrun(job: Job, tmp_path: Path) -> None:
    """The store holds the name of a socket and no key; who reads it can do nothing, and the job goes on."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*JOB, "exchange", "0", str(job.out)]
    rank0 = job.runner.start(command, {**variables, "RANK": "0"})
    address = torchrun.StoreAddress("127.0.0.1", port)
    store = torchrun._open_store(1, address, 60)
    try:
        told = torchrun._wait_for(store, 60)
    finally:
        torchrun._stores.pop(("127.0.0.1", port))
        torchrun._generations = iter(range(1000))  # as if this process had never joined
    name = json.loads(told)["unix"]
    assert not json.loads(told)["authkey"]

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + name)
        return sock

    marker = tmp_path / "executed"
    opened = attack(connect, marker)
    rank1 = job.runner.start(command, {**variables, "RANK": "1"})
    for process in (rank0, rank1):
        done = job.runner.finish(process)
        assert done.status == 0, done.stderr
    check_turned_away(opened)
    check_notes(job.notes(), "torch", 2)
    assert not marker.exists()
    job.runner.check_nothing_left()
