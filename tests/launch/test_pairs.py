"""Connections between pairs of ranks: authenticated, on the right address, with errors that name the rank."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from distmk.bootstrap import pairs
from distmk.bootstrap.base import Launcher, Member
from distmk.bootstrap.link import Link
from distmk.bootstrap.pairs import connect_pairs
from distmk.bootstrap.star import Star
from distmk.bootstrap.star_leaf import StarLeaf
from distmk.bootstrap.star_root import StarRoot
from distmk.errors import DistmkError

TIMEOUT_S = 1.5
Outcomes = list[dict[int, socket.socket] | DistmkError]


@contextlib.contextmanager
def star(num_ranks: int, keys: dict[int, bytes] | None = None) -> Iterator[list[Star]]:
    """The ranks of a star, all in this process; `keys`: of ranks that do not have the usual one."""
    ends = {rank: socket.socketpair() for rank in range(1, num_ranks)}
    key = (keys or {}).get
    root = {rank: Link(end[0], TIMEOUT_S) for rank, end in ends.items()}
    stars: list[Star] = [StarRoot(Member("local", 0, num_ranks), root, key(0, b"key"), TIMEOUT_S, Launcher())]
    for rank, end in ends.items():
        links = {0: Link(end[1], TIMEOUT_S)}
        stars.append(StarLeaf(Member("local", rank, num_ranks), links, key(rank, b"key"), TIMEOUT_S, Launcher()))
    yield stars
    for each in reversed(stars):
        each.close()


def connect_all(stars: list[Star], far: Callable[[int], set[int]]) -> Outcomes:
    """What connect_pairs returns or raises on every rank."""
    outcomes: Outcomes = [{} for _ in stars]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = connect_pairs(stars[rank], far(rank))
        except DistmkError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(stars))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every far pair has a connection of its own, although strangers connect first and say nothing."""
    listening, strangers, listen = [], [], pairs._listen

    def listen_to_strangers(address: str) -> socket.socket:
        server = listen(address)
        listening.append(server.getsockname())
        strangers.extend(socket.create_connection(server.getsockname()) for _ in range(3))
        return server

    monkeypatch.setattr(pairs, "_listen", listen_to_strangers)
    began = time.monotonic()
    with star(4) as stars:
        found = connect_all(stars, lambda rank: {0, 1, 2, 3} - ({0, 1} if rank < 2 else {2, 3}))  # two hosts
        assert time.monotonic() - began < TIMEOUT_S
        for rank, sockets in enumerate(found):
            assert isinstance(sockets, dict) and set(sockets) == ({2, 3} if rank < 2 else {0, 1})
            for other, sock in sockets.items():
                sock.sendall(bytes([rank, other]))
        for rank, sockets in enumerate(found):
            for other, sock in sockets.items():  # type: ignore[union-attr]
                assert sock.recv(2) == bytes([other, rank])
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                sock.close()
    assert len(listening) == 2 and {address for address, _ in listening} == {"127.0.0.1"}
    for address in listening:  # nobody listens any more
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    for stranger in strangers:
        stranger.close()


def test_another_key() -> None:
    """A rank that does not know the key gets no connection; every rank says which one it is."""
    with star(2, keys={1: b"other"}) as stars:
        errors = [str(error) for error in connect_all(stars, lambda rank: {1 - rank})]
    assert errors[0].startswith("rank 1 did not join within 1.5 s; refused for another key or user")
    assert "rank 1 cannot reach rank 0 at 127.0.0.1" in errors[1]
