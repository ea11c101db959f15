"""Several ranks on this host without a launcher: rank 0 starts the others as its child processes.

Rank 0 is the user's own process. The others get their place in the job by environment variables (DISTMK_RANK,
DISTMK_WORLD_SIZE, DISTMK_RENDEZVOUS, DISTMK_AUTHKEY) and join over an abstract-namespace Unix socket, which leaves
nothing on disk. They cannot outlive rank 0: the kernel kills them when it dies (see `setup_follower`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import distmk.errors
from distmk.bootstrap.base import TIMEOUT_ENV
from distmk.bootstrap.star import Link, StarHub, StarSpoke, accept_links, join_link
from distmk.errors import RankLostError, UsageError

RANK_ENV = "DISTMK_RANK"
WORLD_SIZE_ENV = "DISTMK_WORLD_SIZE"
RENDEZVOUS_ENV = "DISTMK_RENDEZVOUS"
AUTHKEY_ENV = "DISTMK_AUTHKEY"

_EXIT_GRACE_S = 10.0
# Once a rank is lost the job has failed, and the user waits for the message.
_LOST_GRACE_S = 3.0
_TERMINATE_GRACE_S = 2.0
_REAP_S = 1.0
_PR_SET_PDEATHSIG = 1


def default_follower_argv() -> list[str]:
    """The command of a follower: this Python, running `distmk.cli.worker_process`. Raises UsageError if Python is unknown."""
    if not sys.executable:
        raise UsageError("several ranks need the path of the Python program, but sys.executable is empty")
    return [sys.executable, "-m", "distmk.cli.worker_process"]


class _Children:
    """The follower processes, started and owned by one thread that lives as long as they may.

    The kernel sends a parent-death signal when the *thread* that forked exits, not the process. The caller's thread may
    end early (a worker of a server, say), so the followers are forked by a thread that waits until `close`.
    """

    def __init__(self, argv: Sequence[str], envs: Sequence[Mapping[str, str]]) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._argv = list(argv)
        self._envs = envs
        self._error: OSError | None = None
        self._started = threading.Event()
        self._cancel = threading.Event()
        self._release = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distmk-followers", daemon=True)

    def start(self) -> None:
        """Start all followers. Raises UsageError if the program cannot be run."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise UsageError(f"cannot start {self._argv[0]}: {self._error.strerror or self._error}")

    def _run(self) -> None:
        # Followers inherit this thread's signal mask: a Ctrl-C during their start-up waits until `setup_follower`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for env in self._envs:
                if self._cancel.is_set():
                    break
                self.processes.append(self._spawn(env))
        except OSError as error:
            self._error = error
        finally:
            self._started.set()
        self._release.wait()

    def _spawn(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Standard output belongs to rank 0 alone, so a follower's goes to the standard error.
        try:
            os.fstat(2)
            stdout = 2
        except OSError:
            stdout = subprocess.DEVNULL
        return subprocess.Popen(self._argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=stdout)

    def close(self, grace_s: float, terminate_s: float = _TERMINATE_GRACE_S) -> None:
        """Wait for the followers to exit, then terminate, then kill; afterwards none is left."""
        if self._thread.ident is None:
            return
        self._cancel.set()
        self._started.wait()
        for send, wait_s in ((None, grace_s), (signal.SIGTERM, terminate_s), (signal.SIGKILL, None)):
            alive = [process for process in self.processes if process.poll() is None]
            if send is not None:
                for process in alive:
                    process.send_signal(send)
            deadline = None if wait_s is None else time.monotonic() + wait_s
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        # Only now: the end of that thread is what kills the followers.
        self._release.set()
        self._thread.join()

    def describe_exit(self, rank: int) -> str | None:
        """How the follower of that rank ended, or None while it runs."""
        process = self.processes[rank - 1]
        status = process.poll()
        if status is None:
            return None
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"rank {rank} (pid {process.pid}) was killed by {signal.Signals(-status).name}"
            return f"rank {rank} (pid {process.pid}) was killed by signal {-status}"
        return f"rank {rank} (pid {process.pid}) exited with status {status}"

    def check(self) -> None:
        """Raise RankLostError if a follower has ended."""
        for rank in range(1, len(self.processes) + 1):
            text = self.describe_exit(rank)
            if text is not None:
                raise RankLostError(text)


class LocalHub(StarHub):
    """Rank 0 with the followers it started; `close` ends and reaps them."""

    def __init__(self, links: Mapping[int, Link], children: _Children, timeout_s: float) -> None:
        super().__init__("local", links, timeout_s)
        self.hostnames = [socket.gethostname()] * self.world_size
        self._children = children
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    @property
    def follower_pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._children.processes]

    def close(self, grace_s: float | None = None) -> None:
        """Tell the followers to leave and reap them; one that stays longer than `grace_s` (10 s) is terminated."""
        # A fork of rank 0 that exits runs this too, and must not end a job that is not its own.
        if os.getpid() != self._owner_pid:
            return
        super().close()
        if grace_s is None:
            grace_s = _EXIT_GRACE_S if self._lost is None else _LOST_GRACE_S
        self._children.close(grace_s)
        atexit.unregister(self.close)

    def abort(self, exit_code: int) -> None:
        super().abort(exit_code)
        self._children.close(0.0, 0.0)
        atexit.unregister(self.close)

    def _check_peers(self) -> None:
        for rank in self._links:
            text = self._children.describe_exit(rank)
            if text is not None and not self._links[rank].conn.poll(0):
                raise self._lose(rank, text)

    def _why_lost(self, rank: int) -> str:
        # The connection ends a moment before the exit status can be had.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._children.processes[rank - 1].wait(_REAP_S)
        return self._children.describe_exit(rank) or f"rank {rank} closed its connection"


def start_local(
    num_ranks: int, follower_argv: Sequence[str] | None, env: Mapping[str, str], timeout_s: float
) -> LocalHub:
    """Become rank 0 of `num_ranks` and start the others.

    Raises UsageError if they cannot be started, RankLostError if one ends or does not join within `timeout_s`.
    """
    argv = list(follower_argv) if follower_argv is not None else default_follower_argv()
    name = f"distmk-{os.getpid()}-{secrets.token_hex(8)}"
    authkey = secrets.token_hex(32)
    shared = {**env, WORLD_SIZE_ENV: str(num_ranks), RENDEZVOUS_ENV: name, AUTHKEY_ENV: authkey}
    shared[TIMEOUT_ENV] = f"{timeout_s:g}"
    shared.update(_import_path(env))
    children = _Children(argv, [{**shared, RANK_ENV: str(rank)} for rank in range(1, num_ranks)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen(num_ranks)
        try:
            children.start()
            links = accept_links(server, num_ranks, bytes.fromhex(authkey), timeout_s, children.check)
            return LocalHub(links, children, timeout_s)
        except BaseException:
            children.close(0.0)
            raise


def join_local(rank: int, world_size: int, env: Mapping[str, str], timeout_s: float) -> StarSpoke:
    """Become follower `rank` of the job that `env` names; also does `setup_follower`.

    Raises RankLostError if rank 0 is gone, UsageError if the key is damaged.
    """
    setup_follower()
    try:
        authkey = bytes.fromhex(env[AUTHKEY_ENV])
    except ValueError as error:
        raise UsageError(f"{AUTHKEY_ENV} must be hexadecimal; it is set by rank 0 and not meant for users") from error
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect("\0" + env[RENDEZVOUS_ENV])
    except OSError as error:
        sock.close()
        raise RankLostError(f"rank 0 is gone: rank {rank} cannot join it ({error.strerror or error})") from error
    spoke = StarSpoke("local", join_link(sock, rank, authkey, timeout_s), rank, world_size, timeout_s)
    spoke.hostnames = [socket.gethostname()] * world_size
    return spoke


def setup_follower(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Make this process a follower: it ignores Ctrl-C and gets `death_signal` from the kernel when rank 0 dies.

    Ctrl-C in a terminal reaches the whole process group; rank 0 alone decides what it means. If rank 0 died before this
    call, no signal comes, but joining it fails. Call it from the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rank 0 starts followers with SIGINT blocked; one that came meanwhile is dropped here, being ignored by now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)


def _import_path(env: Mapping[str, str]) -> dict[str, str]:
    """Let followers import the distmk that rank 0 runs, also when it was found beside the user's script."""
    root = Path(distmk.errors.__file__).resolve().parents[1]
    # An installed one is found anyway, and its folder ahead of the standard library could shadow modules of it.
    if root.name in ("site-packages", "dist-packages"):
        return {}
    old = env.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{old}" if old else str(root)}
