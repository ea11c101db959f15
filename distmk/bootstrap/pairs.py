"""Connections between ranks of different hosts, beside the star: authenticated sockets that carry data."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from distmk.bootstrap.agreement import agree
from distmk.bootstrap.base import Bootstrap
from distmk.bootstrap.link import Link, accept_links
from distmk.bootstrap.messages import gather_json, malformed
from distmk.bootstrap.rendezvous import is_loopback, reach

NUM_CHANNELS = 2  # sockets of a pair


def connect_pairs(bootstrap: Bootstrap, ranks: Sequence[int]) -> dict[int, tuple[socket.socket, ...]]:
    """NUM_CHANNELS blocking TCP sockets to each of `ranks`, which name this rank in turn. Collective.

    Of two ranks the lower one listens. RankLostError or UsageError on every rank: a rank cannot be reached.
    """
    higher = [rank for rank in ranks if rank > bootstrap.rank]
    links: dict[tuple[int, int], Link] = {}
    with contextlib.ExitStack() as stack:
        server = _listen(bootstrap) if higher else None
        if server is not None:
            stack.enter_context(server)
        ports = gather_json(bootstrap, server.getsockname()[1] if server else 0)
        if not all(type(port) is int for port in ports):
            raise malformed("a rank", "no port")

        def connect() -> None:
            # Rank 0 only accepts, rank 1 connects to rank 0 and then accepts, and so on: no two ranks wait for each other.
            for rank in sorted(set(ranks) - set(higher)):
                for channel in range(NUM_CHANNELS):
                    hosts = [bootstrap.address_of(rank)]
                    own = bootstrap.rank * NUM_CHANNELS + channel
                    links[rank, channel] = reach(
                        hosts, ports[rank], own, bootstrap.authkey, bootstrap.timeout_s, f"rank {rank}"
                    )
            if server is not None:
                wanted = {rank * NUM_CHANNELS + channel for rank in higher for channel in range(NUM_CHANNELS)}
                found = accept_links(server, wanted, bootstrap.authkey, bootstrap.timeout_s, lambda: None)
                links.update({divmod(number, NUM_CHANNELS): link for number, link in found.items()})

        try:
            agree(bootstrap, connect)
        except BaseException:
            for link in links.values():
                link.close()
            raise
    return {rank: tuple(links[rank, channel].detach() for channel in range(NUM_CHANNELS)) for rank in ranks}


def _listen(bootstrap: Bootstrap) -> socket.socket:
    """A socket for the ranks that connect here; on one host with virtual nodes it stays off the network."""
    if all(is_loopback(bootstrap.address_of(rank)) for rank in range(bootstrap.world_size)):
        return socket.create_server(("127.0.0.1", 0), backlog=64)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=64)
