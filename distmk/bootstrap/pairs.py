"""Connections beside the star, one for each pair of ranks that share no memory, authenticated by the star's key."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterable

from distmk.bootstrap.agreement import agree
from distmk.bootstrap.base import Bootstrap
from distmk.bootstrap.handshake import accept_links
from distmk.bootstrap.link import Link
from distmk.bootstrap.messages import gather_json, malformed
from distmk.bootstrap.rendezvous import reach
from distmk.errors import DistmkError, RankLostError, UsageError

_BACKLOG = 1024  # strangers may fill the queue


def connect_pairs(bootstrap: Bootstrap, ranks: Iterable[int]) -> dict[int, socket.socket]:
    """A TCP connection to each of `ranks`, which are the ranks that share no memory with this one.

    Collective, also if there are none.

    The lower rank of a pair listens, only on its address of the star and only until its pairs are connected. The
    sockets have the options of the star's links. But TCP is slow to notice that a host is gone while data is on its way
    there; the star notices it within DISTMK_LINK_TIMEOUT_S. RankLostError on every rank: a rank does not come within
    `timeout_s`, or has another key; the message names it.
    """
    far = set(ranks)
    higher, lower = (
        {rank for rank in far if rank > bootstrap.rank},
        sorted(rank for rank in far if rank < bootstrap.rank),
    )
    address = bootstrap.address_of(bootstrap.rank)
    with contextlib.ExitStack() as stack:
        server = agree(bootstrap, lambda: stack.enter_context(_listen(address)) if higher else None)
        ways = _exchange_ways(bootstrap, address, server.getsockname()[1] if server else 0)
        links = agree(bootstrap, lambda: _join_all(bootstrap, server, higher, {rank: ways[rank] for rank in lower}))
    return {rank: link.detach() for rank, link in sorted(links.items())}


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {address} for ranks of other hosts: {error.strerror}") from None


def _exchange_ways(bootstrap: Bootstrap, address: str, port: int) -> list[tuple[str, int]]:
    """Address and port of every rank; port 0: the rank does not listen."""
    ways = gather_json(bootstrap, {"address": address, "port": port}, "address", {"address": str, "port": int})
    for rank, way in enumerate(ways):
        if not re.fullmatch(r"[0-9A-Fa-f.:%\w]{1,255}", way["address"]) or not 0 <= way["port"] < 65536:
            raise malformed(f"rank {rank}", "address")
    return [(way["address"], way["port"]) for way in ways]


def _join_all(
    bootstrap: Bootstrap, server: socket.socket | None, higher: set[int], ways: dict[int, tuple[str, int]]
) -> dict[int, Link]:
    """Connect to the lower ranks, while a thread accepts the higher ones."""
    accepted: dict[int, Link] = {}
    failures: list[DistmkError] = []
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise RankLostError("given up")

    def accept() -> None:
        try:
            if server is not None:
                accepted.update(accept_links(server, higher, bootstrap.authkey, bootstrap.timeout_s, check))
        except DistmkError as error:
            failures.append(type(error)(f"{error}: rank {bootstrap.rank} waits for its connections"))

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    joined: dict[int, Link] = {}
    try:
        for rank, (address, port) in ways.items():
            key, limit_s = bootstrap.authkey, bootstrap.timeout_s
            joined[rank] = reach([address], port, bootstrap.rank, key, limit_s, f"rank {rank}")
        acceptor.join()
        if failures:
            raise failures[0]
    except BaseException:
        stopped.set()
        acceptor.join()
        for link in [*joined.values(), *accepted.values()]:
            link.close()
        raise
    return joined | accepted
