"""Several ranks on this host without a launcher: rank 0 starts the others, the followers, as its child processes.

Rank 0 is the user's own process. Environment variables (DISTMK_RANK, DISTMK_WORLD_SIZE, DISTMK_RENDEZVOUS,
DISTMK_AUTHKEY) tell a follower its rank and how to join. The star's sockets are Unix sockets in the abstract namespace,
which leave nothing on disk. Followers cannot outlive rank 0: the kernel kills them when it dies (`setup_follower`).
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import distmk.errors
from distmk.bootstrap.base import TIMEOUT_ENV, Launcher, Member
from distmk.bootstrap.handshake import accept_links
from distmk.bootstrap.keys import AUTHKEY_ENV
from distmk.bootstrap.rendezvous import join_unix, listen_unix
from distmk.bootstrap.star_leaf import StarLeaf
from distmk.bootstrap.star_root import StarRoot
from distmk.errors import RankLostError, UsageError
from distmk.progress import progress

RANK_ENV = "DISTMK_RANK"
WORLD_SIZE_ENV = "DISTMK_WORLD_SIZE"
RENDEZVOUS_ENV = "DISTMK_RENDEZVOUS"

EXIT_GRACE_S = 10.0  # time that followers have to leave before they are terminated
_LOST_GRACE_S = 3.0  # shorter once a rank is lost: the user waits for the message
_TERMINATE_GRACE_S = 2.0
_REAP_S = 1.0
_PR_SET_PDEATHSIG = 1


def default_follower_argv() -> list[str]:
    """The command of a follower: this Python, running `distmk.cli.worker_process`. Raises UsageError if Python is unknown."""
    if not sys.executable:
        raise UsageError("several ranks need the path of the Python program, but sys.executable is empty")
    return [sys.executable, "-m", "distmk.cli.worker_process"]


class Followers(Launcher):
    """The follower processes, forked and owned by a thread that lives as long as they may.

    The kernel sends a parent-death signal when the *thread* that forked exits, not the process. The caller's thread may
    end early (a server's worker thread does), so the followers are forked by a thread that waits until `end`.
    """

    def __init__(self, argv: Sequence[str], envs: Sequence[Mapping[str, str]]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._argv = list(argv)
        self._envs = envs
        self._error: OSError | None = None
        self._started = threading.Event()
        self._cancel = threading.Event()
        self._release = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distmk-followers", daemon=True)
        self._close_at_exit: Callable[[], None] | None = None

    def start(self) -> None:
        """Start all followers. Raises UsageError if the program cannot be run."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise UsageError(f"cannot start {self._argv[0]}: {self._error.strerror or self._error}")

    def _run(self) -> None:
        # Followers inherit this thread's signal mask, so that Ctrl-C during their start waits until `setup_follower`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for env in self._envs:
                if self._cancel.is_set():
                    break
                self._processes.append(self._spawn(env))
        except OSError as error:
            self._error = error
        finally:
            self._started.set()
        self._release.wait()

    def _spawn(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Only rank 0 writes to standard output. A follower's output goes to standard error, if that is open.
        try:
            os.fstat(2)
            stdout = 2
        except OSError:
            stdout = subprocess.DEVNULL
        return subprocess.Popen(self._argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=stdout)

    def end(self, grace_s: float, terminate_s: float = _TERMINATE_GRACE_S) -> None:
        """Wait for the followers to exit, then terminate the rest, then kill the rest. None is left afterwards."""
        if self._thread.ident is None:
            return
        self._cancel.set()
        self._started.wait()
        for process in self._processes:
            if process.poll() is None and _is_stopped(process.pid):
                process.kill()  # it would neither leave nor react to SIGTERM
        for send, wait_s in ((None, grace_s), (signal.SIGTERM, terminate_s), (signal.SIGKILL, None)):
            alive = [process for process in self._processes if process.poll() is None]
            if send is not None:
                for process in alive:
                    process.send_signal(send)
            deadline = None if wait_s is None else time.monotonic() + wait_s
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        # Not earlier, because the end of that thread kills the followers.
        self._release.set()
        self._thread.join()

    def close_at_exit(self, close: Callable[[], None]) -> None:
        """Call `close` when Python exits, unless the star has been closed before."""
        self._close_at_exit = close
        atexit.register(close)

    def check_joining(self) -> None:
        for rank in range(1, len(self._processes) + 1):
            text = self.describe_exit(rank)
            if text is not None:
                raise RankLostError(text)

    def describe_exit(self, rank: int) -> str | None:
        process = self._processes[rank - 1]
        status = process.poll()
        if status is None:
            return None
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"rank {rank} (pid {process.pid}) was killed by {signal.Signals(-status).name}"
            return f"rank {rank} (pid {process.pid}) was killed by signal {-status}"
        return f"rank {rank} (pid {process.pid}) exited with status {status}"

    def describe_stop(self, rank: int) -> str | None:
        pid = self._processes[rank - 1].pid
        return f"rank {rank} (pid {pid}) is stopped" if _is_stopped(pid) else None

    def describe_loss(self, rank: int) -> str:
        # The connection ends a moment before the exit status is available.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank - 1].wait(_REAP_S)
        return self.describe_exit(rank) or f"rank {rank} closed its connection"

    def closed(self, in_order: bool) -> None:
        self.end(EXIT_GRACE_S if in_order else _LOST_GRACE_S)
        self._forget_exit()

    def abort(self, exit_code: int) -> None:
        self.end(0.0, 0.0)
        self._forget_exit()

    def _forget_exit(self) -> None:
        if self._close_at_exit is not None:
            atexit.unregister(self._close_at_exit)
            self._close_at_exit = None


def start_local(
    num_ranks: int, follower_argv: Sequence[str] | None, env: Mapping[str, str], timeout_s: float
) -> StarRoot:
    """Become rank 0 of `num_ranks` ranks and start the others.

    Raises UsageError if they cannot be started, RankLostError if one ends or does not join within `timeout_s`.
    """
    argv = list(follower_argv) if follower_argv is not None else default_follower_argv()
    server = listen_unix()
    name = server.getsockname()[1:].decode()
    authkey = secrets.token_hex(32)
    shared = {**env, WORLD_SIZE_ENV: str(num_ranks), RENDEZVOUS_ENV: name, AUTHKEY_ENV: authkey}
    shared[TIMEOUT_ENV] = f"{timeout_s:g}"
    shared.update(_import_path(env))
    followers = Followers(argv, [{**shared, RANK_ENV: str(rank)} for rank in range(1, num_ranks)])
    with server:
        try:
            followers.start()
            others = set(range(1, num_ranks))
            with progress(f"starting {len(others)} more ranks"):
                links = accept_links(server, others, bytes.fromhex(authkey), timeout_s, followers.check_joining)
        except BaseException:
            followers.end(0.0)
            raise
    root = StarRoot(Member("local", 0, num_ranks), links, bytes.fromhex(authkey), timeout_s, followers)
    root.hostnames = [socket.gethostname()] * num_ranks
    followers.close_at_exit(root.close)
    return root


def join_local(rank: int, world_size: int, env: Mapping[str, str], timeout_s: float) -> StarLeaf:
    """Become follower `rank` of the job that `env` describes; calls `setup_follower` first.

    Raises RankLostError if rank 0 is gone, UsageError if the key is malformed.
    """
    setup_follower()
    try:
        authkey = bytes.fromhex(env[AUTHKEY_ENV])
    except ValueError as error:
        raise UsageError(f"{AUTHKEY_ENV} must be hexadecimal; it is set by rank 0 and not meant for users") from error
    link = join_unix(env[RENDEZVOUS_ENV], rank, authkey, timeout_s)
    leaf = StarLeaf(Member("local", rank, world_size), {0: link}, authkey, timeout_s, Launcher())
    leaf.hostnames = [socket.gethostname()] * world_size
    return leaf


def setup_follower(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Make this process a follower: it ignores Ctrl-C, and the kernel sends it `death_signal` when rank 0 dies.

    Ctrl-C in a terminal reaches the whole process group, but only rank 0 handles it. If rank 0 died before this call,
    no signal comes, but joining fails. Call this from the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rank 0 starts followers with SIGINT blocked. A pending SIGINT is dropped here, since it is ignored by now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger (proc_pid_stat(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _import_path(env: Mapping[str, str]) -> dict[str, str]:
    """The PYTHONPATH with which followers import rank 0's distmk, even if it was found beside the user's script."""
    root = Path(distmk.errors.__file__).resolve().parents[1]
    # An installed package is found anyway, and its folder could shadow modules of the standard library.
    if root.name in ("site-packages", "dist-packages"):
        return {}
    old = env.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{old}" if old else str(root)}
