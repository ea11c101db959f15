"""Build the star: a launcher carries the way to rank 0 to the other ranks, which then connect to it.

On one host the way is an abstract Unix socket, between hosts it is TCP. Whatever the launcher carries may come from a
stranger: it is checked, and a wrong way ends in a handshake that fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmk.bootstrap.base import Launcher, Member
from distmk.bootstrap.keys import UNAUTHENTICATED_ENV, no_key_error, public_key, read_authkey
from distmk.bootstrap.link import Link, accept_links, join_link
from distmk.bootstrap.messages import gather_json, malformed, parse_json
from distmk.bootstrap.star import Star, StarHub, StarSpoke
from distmk.console import progress
from distmk.errors import RankLostError, UsageError

# Carries a payload of at most 1 KiB from rank 0 to all ranks: rank 0 gives it, the others give None, all get it.
Carry = Callable[[bytes | None], bytes]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_HOSTS = 12
_ATTEMPT_S = 10.0  # for each of several addresses but the last
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Introducer:
    """A launcher's way to reach all ranks once. `is_private`: only ranks of the job can read what it carries."""

    carry: Carry
    is_private: bool


@dataclass(frozen=True)
class Way:
    """The way to rank 0: the name of an abstract Unix socket, or hosts and a port; and the key, if the launcher carries it."""

    unix: str = ""
    hosts: tuple[str, ...] = ()
    port: int = 0
    authkey: str = ""

    def encode(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @staticmethod
    def decode(payload: bytes) -> Way:
        """Undo `encode`. DistmkError: the launcher carried something else."""
        value = parse_json(payload, "the launcher")
        kinds = {"unix": str, "hosts": list, "port": int, "authkey": str}
        if not (isinstance(value, dict) and value.keys() == kinds.keys()):
            raise malformed("the launcher", "no address of rank 0")
        right = all(type(value[name]) is kind for name, kind in kinds.items())
        if not right or not all(isinstance(host, str) for host in value["hosts"]) or not 0 <= value["port"] < 65536:
            raise malformed("the launcher", "no address of rank 0")
        return Way(**{**value, "hosts": tuple(value["hosts"][:_MOST_HOSTS])})


def join_star(
    member: Member,
    introducer: Introducer,
    hosts: Sequence[str],
    timeout_s: float,
    launcher: Launcher | None = None,
    env: Mapping[str, str] | None = None,
) -> Star:
    """Connect this process with the other ranks; collective.

    `hosts` are names or addresses of rank 0's host, the likeliest first, used on rank 0 only. Raises RankLostError if a rank
    is missing after `timeout_s`, UsageError if ranks on several hosts have no key.
    """
    launcher = launcher or Launcher()
    env = os.environ if env is None else env
    star: Star
    if member.rank == 0:
        star = _become_hub(member, introducer, hosts, timeout_s, launcher, env)
    else:
        star = _become_spoke(member, introducer, timeout_s, launcher, env)
    try:
        _exchange_hosts(star, member)
    except BaseException:
        star.close()
        raise
    return star


def _become_hub(
    member: Member,
    introducer: Introducer,
    hosts: Sequence[str],
    timeout_s: float,
    launcher: Launcher,
    env: Mapping[str, str],
) -> StarHub:
    key = read_authkey(env)
    bind = env.get(UNAUTHENTICATED_ENV)
    one_host = member.local_size == member.world_size or all(host in _LOOPBACK for host in hosts)
    # Without a key, a Unix socket is the only way that tells who comes.
    by_unix = one_host or (key is None and not bind and not introducer.is_private)
    authkey = key or (public_key() if bind and not by_unix else secrets.token_bytes(32))
    with listen_unix(member.world_size) if by_unix else _listen(bind, member.world_size) as server:
        carried = authkey.hex() if introducer.is_private and key is None else ""
        if by_unix:
            way = Way(unix=server.getsockname()[1:].decode(), authkey=carried)
        else:
            reachable_at = (bind,) if bind else tuple(hosts[:_MOST_HOSTS])
            way = Way(hosts=reachable_at, port=server.getsockname()[1], authkey=carried)
            if bind:
                print(f"distmk: warning: {UNAUTHENTICATED_ENV}: whoever reaches {bind} can join", file=sys.stderr)
        introducer.carry(way.encode())
        # Over a Unix socket the handshake needs no secret: each side is told the user of the other.
        handshake_key = public_key() if by_unix else authkey
        others = set(range(1, member.world_size))
        with progress(f"waiting for {len(others)} more ranks to join"):
            links = accept_links(server, others, handshake_key, timeout_s, launcher.check_joining)
    return StarHub(member, links, authkey, timeout_s, launcher)


def listen_unix(backlog: int) -> socket.socket:
    """A socket that listens in the abstract namespace, which leaves nothing on disk, under a random name."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0distmk-{os.getpid()}-{secrets.token_hex(16)}")
    server.listen(backlog)
    return server


def _listen(address: str | None, backlog: int) -> socket.socket:
    if address:
        try:
            return socket.create_server((address, 0), backlog=backlog)
        except OSError as error:
            raise UsageError(f"{UNAUTHENTICATED_ENV}={address} is no address here: {error.strerror}") from None
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _become_spoke(
    member: Member, introducer: Introducer, timeout_s: float, launcher: Launcher, env: Mapping[str, str]
) -> StarSpoke:
    key = read_authkey(env)
    way = Way.decode(introducer.carry(None))
    if introducer.is_private and way.authkey and key is None:
        key = bytes.fromhex(way.authkey)
    if way.unix:
        try:
            link = join_unix(way.unix, member.rank, public_key(), timeout_s)
        except RankLostError as error:
            raise RankLostError(
                f"{error}, or on another host; ranks on several hosts need a key (launch/README.md, Who may join)"
            ) from error
        return StarSpoke(member, {0: link}, key or b"", timeout_s, launcher)
    if key is None and env.get(UNAUTHENTICATED_ENV):
        key = public_key()
    if key is None:
        raise no_key_error(member.rank)
    link = reach(way.hosts, way.port, member.rank, key, timeout_s)
    return StarSpoke(member, {0: link}, key, timeout_s, launcher)


def join_unix(name: str, rank: int, authkey: bytes, timeout_s: float) -> Link:
    """The link to rank 0 over the abstract Unix socket `name`. Raises RankLostError if that is not there, or not this user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect("\0" + name)
    except OSError as error:
        sock.close()
        raise RankLostError(f"rank 0 is gone: rank {rank} cannot join it ({error.strerror or error})") from error
    return join_link(sock, rank, authkey, timeout_s)


def reach(hosts: Sequence[str], port: int, rank: int, authkey: bytes, timeout_s: float, to: str = "rank 0") -> Link:
    """Connect under the first of `hosts` that leads to rank `to`; whether it does, the handshake shows."""
    deadline = time.monotonic() + timeout_s
    failures = []
    for index, host in enumerate(hosts):
        left_s = max(0.1, deadline - time.monotonic())
        limit_s = left_s if index == len(hosts) - 1 else min(left_s, _ATTEMPT_S)
        try:
            link = join_link(socket.create_connection((host, port), limit_s), rank, authkey, limit_s, to)
        except (OSError, RankLostError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            failures.append(f"{host} port {port}: {reason or error}")
            continue
        link.set_timeout(timeout_s)
        return link
    raise RankLostError(f"rank {rank} cannot reach {to} at {'; nor at '.join(failures)}")


def _exchange_hosts(star: Star, member: Member) -> None:
    """Set the hosts, the job's key where rank 0 made it, and the local rank and size if the launcher did not give them.

    The launcher's own local rank has precedence, since the launcher may also have chosen the visible GPUs by it.
    """
    by_unix = all(link.is_unix for link in star.links())
    mine: list[Any] = [socket.gethostname(), _boot_id(), star.authkey.hex() if by_unix and star.rank == 0 else ""]
    hosts = gather_json(star, mine)
    if not all(isinstance(host, list) and [type(each) for each in host] == [str] * 3 for host in hosts):
        raise malformed("a rank", "no name of its host")
    star.hostnames = [hostname for hostname, _, _ in hosts]
    star.host_ids = [f"{hostname} {boot}" for hostname, boot, _ in hosts]
    star.authkey = star.authkey or bytes.fromhex(hosts[0][2])
    same_host = [rank for rank, host in enumerate(star.host_ids) if host == star.host_ids[star.rank]]
    if member.local_rank is None:
        star.local_rank = same_host.index(star.rank)
    if member.local_size is None:
        star.local_size = len(same_host)


def _boot_id() -> str:
    """Tells apart hosts of one name; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_hosts() -> list[str]:
    """This host's name, then the IPv4 addresses of its interfaces except loopback.

    For launchers that give no address of rank 0. The name may not resolve elsewhere, or to a loopback address.
    """
    hosts = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
                if not address.startswith("127."):
                    hosts.append(address)
    return hosts
