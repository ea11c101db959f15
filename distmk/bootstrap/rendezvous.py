"""Builds the star: a launcher carries the route to rank 0 to the other ranks, which then connect to rank 0.

On one host the route is an abstract Unix socket, between hosts it is TCP. Whatever the launcher carries may come from a
stranger. It is checked, and a wrong route ends in a handshake that fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distmk.bootstrap.base import Launcher, Member
from distmk.bootstrap.handshake import accept_links, join_link
from distmk.bootstrap.keys import UNAUTHENTICATED_ENV, check_key, is_one_host, no_key_error, public_key, read_authkey
from distmk.bootstrap.link import Link
from distmk.bootstrap.messages import from_json, gather_json, malformed, to_json
from distmk.bootstrap.star import Star
from distmk.bootstrap.star_leaf import StarLeaf
from distmk.bootstrap.star_root import StarRoot
from distmk.console import tell
from distmk.errors import RankLostError, UsageError
from distmk.progress import progress

# Carries a payload of at most 1 KiB from rank 0 to all ranks: rank 0 passes it, the others pass None, and all get it.
Carry = Callable[[bytes | None], bytes]

_ANY = ("0.0.0.0", "::")
_NAME = r"[\w.:%-]{1,255}"  # name of a host or a Unix socket
_MOST_HOSTS = 12
_BACKLOG = 1024  # strangers may fill the queue
_ATTEMPT_S = 10.0  # limit for each of several addresses, except the last one
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Introducer:
    """A launcher's means to reach all ranks once. `is_private`: only ranks of the job can read what it carries."""

    carry: Carry
    is_private: bool


@dataclass(frozen=True)
class Route:
    """The route to rank 0: an abstract Unix socket, or hosts and a port; and the key, if the launcher carries it."""

    unix: str = ""
    hosts: tuple[str, ...] = ()
    port: int = 0
    authkey: str = ""

    def encode(self) -> bytes:
        return to_json(asdict(self))

    @staticmethod
    def decode(payload: bytes) -> Route:
        """Undo `encode`. DistmkError: the launcher carried something else."""
        shape = {"unix": str, "hosts": [str], "port": int, "authkey": str}
        value = from_json(payload, "the launcher", "address of rank 0", shape)
        named = all(re.fullmatch(_NAME, name) for name in [*value["hosts"], value["unix"] or "none"])
        if not named or not 0 <= value["port"] < 65536 or not re.fullmatch("(?:[0-9a-f]{2})*", value["authkey"]):
            raise malformed("the launcher", "address of rank 0")
        return Route(value["unix"], tuple(value["hosts"][:_MOST_HOSTS]), value["port"], value["authkey"])


def join_star(
    member: Member,
    introducer: Introducer,
    hosts: Sequence[str],
    timeout_s: float,
    launcher: Launcher | None = None,
    env: Mapping[str, str] | None = None,
) -> Star:
    """Connect this process with the other ranks; collective.

    `hosts` are names or addresses of rank 0's host, the likeliest first, used on rank 0 only. Raises RankLostError if a
    rank is missing after `timeout_s`, UsageError if ranks on several hosts have no key.
    """
    launcher = launcher or Launcher()
    env = os.environ if env is None else env
    star: Star
    if member.rank == 0:
        star = _become_root(member, introducer, hosts, timeout_s, launcher, env)
    else:
        star = _become_leaf(member, introducer, timeout_s, launcher, env)
    try:
        _exchange_hosts(star, member)
    except BaseException:
        star.close()
        raise
    return star


def _become_root(
    member: Member,
    introducer: Introducer,
    hosts: Sequence[str],
    timeout_s: float,
    launcher: Launcher,
    env: Mapping[str, str],
) -> StarRoot:
    try:
        server, route, authkey = _open(member, introducer.is_private, hosts, env)
    except UsageError:
        introducer.carry(Route().encode())  # so that no other rank waits
        raise
    with server:
        introducer.carry(route.encode())
        # Over a Unix socket the handshake needs no secret: each side learns the user of the other from the kernel.
        handshake_key = public_key() if route.unix else authkey
        others = set(range(1, member.world_size))
        with progress(f"waiting for {len(others)} more ranks to join"):
            links = accept_links(server, others, handshake_key, timeout_s, launcher.check_joining)
    return StarRoot(member, links, authkey, timeout_s, launcher)


def _open(
    member: Member, is_private: bool, hosts: Sequence[str], env: Mapping[str, str]
) -> tuple[socket.socket, Route, bytes]:
    """A socket that listens for the other ranks, the route to it, and the job's key. UsageError: the ranks need a key."""
    key, bind = check_key(member, is_private, hosts, env), env.get(UNAUTHENTICATED_ENV)
    authkey = key or secrets.token_bytes(32)
    carried = authkey.hex() if is_private and key is None else ""
    # Without a key, only a Unix socket shows which user connects.
    if is_one_host(member, hosts) or (key is None and not bind and not is_private):
        server = listen_unix()
        return server, Route(unix=server.getsockname()[1:].decode(), authkey=carried), authkey
    if key is None and bind:
        authkey, carried, hosts = public_key(), "", [bind]
        tell(f"warning: {UNAUTHENTICATED_ENV}: whoever reaches {bind} can join")
    server = _listen(hosts, must_bind=key is None and bool(bind))
    address, port = server.getsockname()[:2]
    # On other hosts the name may resolve to another address.
    reachable_at = hosts if address in _ANY or address in hosts else [*hosts, address]
    return server, Route(hosts=tuple(reachable_at[:_MOST_HOSTS]), port=port, authkey=carried), authkey


def listen_unix() -> socket.socket:
    """A listening socket with a random name in the abstract namespace, which leaves nothing on disk."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0distmk-{os.getpid()}-{secrets.token_hex(16)}")
    server.listen(_BACKLOG)
    return server


def _listen(hosts: Sequence[str], must_bind: bool) -> socket.socket:
    """A TCP socket that listens at the address of `hosts` if that is one address of this host, else everywhere.

    `must_bind`: never listen everywhere. UsageError: `hosts` is not an address of this host.
    """
    if len(hosts) == 1:
        try:
            family, *_, address = socket.getaddrinfo(hosts[0], 0, type=socket.SOCK_STREAM)[0]
            if must_bind or not ipaddress.ip_address(address[0]).is_loopback:
                return socket.create_server((str(address[0]), 0), family=family, backlog=_BACKLOG)
        except (OSError, ValueError) as error:
            if must_bind:
                raise UsageError(f"{UNAUTHENTICATED_ENV}={hosts[0]} is no address of this host: {error}") from None
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _become_leaf(
    member: Member, introducer: Introducer, timeout_s: float, launcher: Launcher, env: Mapping[str, str]
) -> StarLeaf:
    key = read_authkey(env)
    route = Route.decode(introducer.carry(None))
    if introducer.is_private and route.authkey and key is None:
        key = bytes.fromhex(route.authkey)
    if route.unix:
        try:
            link = join_unix(route.unix, member.rank, public_key(), timeout_s)
        except RankLostError as error:
            raise RankLostError(
                f"{error}, or on another host; ranks on several hosts need a key (launch/README.md, Who may join)"
            ) from error
        return StarLeaf(member, {0: link}, key or b"", timeout_s, launcher)
    if not route.hosts and key is not None:
        raise RankLostError("rank 0 cannot let other ranks join; its own message says why")
    if key is None and route.hosts and env.get(UNAUTHENTICATED_ENV):
        key = public_key()
    if key is None:
        raise no_key_error()
    link = reach(route.hosts, route.port, member.rank, key, timeout_s)
    return StarLeaf(member, {0: link}, key, timeout_s, launcher)


def join_unix(name: str, rank: int, authkey: bytes, timeout_s: float) -> Link:
    """The link to rank 0 over the abstract Unix socket `name`. RankLostError: there is none, or it is another user's."""

    def connect(limit_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(limit_s)
            sock.connect("\0" + name)
        except BaseException:
            sock.close()
            raise
        return sock

    try:
        return join_link(connect, rank, authkey, timeout_s)
    except OSError as error:
        raise RankLostError(f"rank 0 is gone: rank {rank} cannot join it ({error.strerror or error})") from error


def reach(hosts: Sequence[str], port: int, rank: int, authkey: bytes, timeout_s: float, to: str = "rank 0") -> Link:
    """Connect to the first of `hosts` that leads to rank `to`, which the handshake proves."""
    deadline = time.monotonic() + timeout_s
    failures = []
    for index, host in enumerate(hosts):
        left_s = max(0.1, deadline - time.monotonic())
        limit_s = left_s if index == len(hosts) - 1 else min(left_s, _ATTEMPT_S)

        def connect(limit_s: float, host: str = host) -> socket.socket:
            return socket.create_connection((host, port), limit_s)

        try:
            link = join_link(connect, rank, authkey, limit_s, to)
        except (OSError, RankLostError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            failures.append(f"{host} port {port}: {reason or error}")
            continue
        link.timeout_s = timeout_s
        return link
    raise RankLostError(f"rank {rank} cannot reach {to} at {'; nor at '.join(failures)}")


def _exchange_hosts(star: Star, member: Member) -> None:
    """Set hosts and addresses of all ranks, the key if rank 0 made it, and local rank and size if the launcher did not.

    The launcher's own local rank has precedence, since the launcher may also have chosen the visible GPUs by it.
    """
    mine = {"name": socket.gethostname(), "boot": _boot_id()}
    hosts = gather_json(star, mine, "name of its host", {"name": str, "boot": str})
    known = None
    if star.rank == 0:
        # Ranks that have joined over a private Unix socket do not have the key.
        is_private = all(link.is_unix for link in star.links())
        known = to_json({"addresses": _addresses(star), "authkey": star.authkey.hex() if is_private else ""})
    answer = from_json(star.broadcast(known), "rank 0", "addresses of the ranks", {"addresses": [str], "authkey": str})
    if len(answer["addresses"]) != star.world_size or not re.fullmatch("(?:[0-9a-f]{2})*", answer["authkey"]):
        raise malformed("rank 0", "addresses of the ranks")
    star.addresses = answer["addresses"]
    star.authkey = star.authkey or bytes.fromhex(answer["authkey"])
    star.hostnames = [host["name"] for host in hosts]
    star.host_ids = [f"{each['name']} {each['boot']} {at}" for each, at in zip(hosts, star.addresses, strict=True)]
    same_host = [rank for rank, host in enumerate(star.host_ids) if host == star.host_ids[star.rank]]
    if member.local_rank is None:
        star.local_rank = same_host.index(star.rank)
    if member.local_size is None:
        star.local_size = len(same_host)


def _addresses(star: Star) -> list[str]:
    """On rank 0: the address of each rank as other hosts see it. It is the same for all ranks of a host."""
    links = star.links()
    far = {link: link.peer_address() for link in links if not link.is_near}
    own = next(iter(far)).own_address() if far else "127.0.0.1"
    return [own, *(far.get(link, own) for link in links)]


def _boot_id() -> str:
    """A value that distinguishes hosts of the same name; empty if the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_hosts() -> list[str]:
    """This host's name, then the IPv4 addresses of its interfaces except loopback.

    For launchers that give no address of rank 0. On other hosts the name may not resolve, or may resolve to a loopback
    address.
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
