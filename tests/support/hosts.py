"""Several hosts on one machine: network namespaces, each with its own host name, /dev/shm and /etc/hosts.

The hosts hang on a bridge in a namespace of its own, or on TUN devices whose packets `tests/support/slow_link.py` delays and
drops. Needs root and iproute2. File system, clock and process ids are shared, which a test can only avoid to rely on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.77.0"
NETNS_FILES = Path("/etc/netns")
SLOW_LINK = Path(__file__).with_name("slow_link.py")
MADE_NAME = "dmk"


@dataclass(frozen=True)
class Host:
    """A host: its name, its namespace, its address, and the process that keeps its own /dev/shm and host name alive."""

    name: str
    namespace: str
    address: str
    holder: subprocess.Popen[str]

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, to be run on this host."""
        return ["nsenter", "-t", str(self.holder.pid), "-m", "-u", "-n", "--", *argv]

    def cut(self) -> None:
        """Take the link down: nothing reaches this host any more, and it reaches nobody."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def kill(self) -> None:
        """Kill all processes of this host, its holder excepted."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout.split()
        for pid in map(int, pids):
            if pid != self.holder.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play several hosts; None if it can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (packages iproute2, util-linux, mount)"
    try:
        with make_hosts(1):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not allowed here: {detail.strip()}"


@contextlib.contextmanager
def make_hosts(count: int, *, delay_ms: float = 0.0, loss: float = 0.0) -> Iterator[list[Host]]:
    """`count` hosts that reach each other; removed, with all processes on them, at the end.

    delay_ms, loss: of each packet, one way (loss: the share that is dropped, 0 to 1); 0 and 0: a bridge.
    """
    prefix = f"{MADE_NAME}{uuid.uuid4().hex[:6]}"
    names = [f"host-{'abcdefgh'[index]}" for index in range(count)]
    with contextlib.ExitStack() as stack:
        slow = delay_ms > 0 or loss > 0
        if not slow:
            _add_namespace(stack, f"{prefix}s")
            _ip("-n", f"{prefix}s", "link", "add", "br0", "type", "bridge")
            _ip("-n", f"{prefix}s", "link", "set", "br0", "up")
        hosts = []
        for index, name in enumerate(names):
            namespace = f"{prefix}{'abcdefgh'[index]}"
            _add_namespace(stack, namespace)
            _write_hosts_file(stack, namespace, name, names)
            if not slow:
                _plug_in(prefix, namespace, index)
                _configure(namespace, index)
            hosts.append(Host(name, namespace, f"{SUBNET}.{index + 1}", _hold(stack, namespace, name)))
        if slow:
            _start_slow_link(stack, [host.namespace for host in hosts], delay_ms, loss)
            for index, host in enumerate(hosts):
                _configure(host.namespace, index)
        yield hosts
        for host in hosts:
            host.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def _add_namespace(stack: contextlib.ExitStack, namespace: str) -> None:
    _ip("netns", "add", namespace)
    stack.callback(lambda: subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=20))
    _ip("-n", namespace, "link", "set", "lo", "up")


def _write_hosts_file(stack: contextlib.ExitStack, namespace: str, own: str, names: Sequence[str]) -> None:
    """`ip netns exec` mounts /etc/netns/NAME/hosts over /etc/hosts, so that each host knows all names."""
    folder = NETNS_FILES / namespace
    folder.mkdir(parents=True)
    stack.callback(lambda: shutil.rmtree(folder, ignore_errors=True))
    lines = ["127.0.0.1 localhost", *(f"{SUBNET}.{index + 1} {name}" for index, name in enumerate(names))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _plug_in(prefix: str, namespace: str, index: int) -> None:
    """A cable from the bridge to the host's eth0."""
    switch = f"{prefix}s"
    _ip("-n", switch, "link", "add", f"v{index}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", switch, "link", "set", f"v{index}", "master", "br0", "up")


def _configure(namespace: str, index: int) -> None:
    _ip("-n", namespace, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")


def _hold(stack: contextlib.ExitStack, namespace: str, name: str) -> subprocess.Popen[str]:
    """A process with the host's own mounts and host name, for as long as the host is there."""
    script = f"hostname {name} && mount -t tmpfs -o size=2g tmpfs /dev/shm && echo ready && exec sleep 1000000"
    command = ["ip", "netns", "exec", namespace, "unshare", "-m", "-u", "sh", "-c", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack.callback(_end, holder)
    assert holder.stdout and holder.stderr
    if holder.stdout.readline().strip() != "ready":
        raise OSError(holder.stderr.read())
    return holder


def _start_slow_link(stack: contextlib.ExitStack, namespaces: Sequence[str], delay_ms: float, loss: float) -> None:
    command = [sys.executable, str(SLOW_LINK), str(delay_ms), str(loss), *namespaces]
    forwarder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, forwarder)
    assert forwarder.stdout
    if forwarder.stdout.readline().strip() != "ready":
        raise OSError("the slow link cannot be made: no TUN devices")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def remove_leftovers() -> None:
    """Remove namespaces of tests that were killed; those of tests that run beside this one are younger than an hour."""
    for path in Path("/run/netns").glob(f"{MADE_NAME}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True, timeout=20)
                shutil.rmtree(NETNS_FILES / path.name, ignore_errors=True)
