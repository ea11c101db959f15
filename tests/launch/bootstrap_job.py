"""The program of each rank in test_bootstrap*.py: it joins, runs its part of a scenario, and writes down the outcome."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from distmk.bootstrap import agree, agree_same, connect, local
from distmk.errors import DistmkError, ModelError, RankLostError

scenario, num_ranks, out = sys.argv[1], int(sys.argv[2]) or None, Path(sys.argv[3])


def note(rank, **what):
    unfinished = out / f"{rank}.{os.getpid()}.tmp"  # ranks that do not know their number have one name
    unfinished.write_text(json.dumps(what))
    unfinished.rename(out / f"{rank}.json")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def exchange(b):
    gathered = [p.decode() for p in b.allgather(f"from {b.rank}".encode() * (1 + b.rank * 100_000))]
    shared = b.broadcast(b"x" * 300_000 if b.rank == 0 else None)
    b.barrier()
    commands = []
    if b.rank == 0:
        for i in range(3):
            b.send_command(f"do {i}".encode())
    else:
        while (command := b.next_command()) is not None:
            commands.append(command.decode())
    print(f"stdout of rank {b.rank}", flush=True)
    note(
        b.rank,
        first=[p[:6] for p in gathered],
        sizes=[len(p) for p in gathered],
        shared=len(shared),
        commands=commands,
        kind=b.kind,
        size=b.world_size,
        local=[b.local_rank, b.local_size],
        hosts=b.hostnames,
    )


def one_fails(b):
    agree(b, lambda: 1)

    def fn():
        if b.rank >= 1:
            raise ModelError(f"no config.json on {b.rank}")

    agree(b, fn)


def all_fail(b):
    def fn():
        raise ModelError("no config.json")

    agree(b, fn)


def bug(b):
    agree(b, lambda: {}["key"] if b.rank == 1 else 0)


def same(b):
    agree_same(b, "models", {"--model": "a", "--seed": "1"})
    agree_same(b, "models", {"--model": "b" if b.rank == 2 else "a", "--seed": "1"})


def follower_killed(b):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun's, 0.25 s after the death
    b.barrier()
    if b.rank == 2:
        time.sleep(0.3)
        die()
    b.allgather(b"")


def follower_killed_at_command(b):
    b.barrier()
    if b.rank == 0:
        time.sleep(0.5)
        try:
            while True:
                b.send_command(b"go")
                time.sleep(0.05)
        finally:
            time.sleep(0.3)
    elif b.rank == 2:
        die()
    else:
        while b.next_command():
            pass


def hub_killed(b):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    b.barrier()
    if b.rank == 0:
        time.sleep(0.5)
        die()
    if b.rank == 1:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # undo the parent-death signal, so that the connection ends first
        b.next_command()
    if b.rank == 2:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        b.allgather(b"")
    time.sleep(60)


def silent(b):
    b.barrier()
    if b.rank == 1:
        time.sleep(60)
    b.allgather(b"")


def stubborn(b):
    if b.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        b.barrier()
        while True:
            time.sleep(60)
    b.barrier()
    start = time.monotonic()
    local.EXIT_GRACE_S = 0.5
    b.close()
    b.close()
    note(0, close_s=time.monotonic() - start)


def interrupted(b):
    b.barrier()
    if b.rank == 0:
        signal.signal(signal.SIGINT, lambda *_: None)
        os.killpg(0, signal.SIGINT)
        time.sleep(0.3)
    note(b.rank, gathered=len(b.allgather(b"")))


def slow_to_leave(b):
    if b.rank:
        b.next_command()
        time.sleep(1)
        note(b.rank, left=True)


def forked(b):
    """Forks of rank 0 that run the handlers registered for exit, while the group is open and after it."""

    def fork():
        if b.rank == 0:
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)

    fork()
    note(b.rank, gathered=len(b.allgather(b"")))
    b.close()
    fork()


def aborted(b):
    b.barrier()
    if b.rank == 0:
        b.abort(9)
        return
    time.sleep(60)


def exit_early(b):
    b.barrier()  # rank 2 exits before it joins, see main


def raises(b):
    """One rank leaves by an error of its own, so that its `with` block closes while the others exchange."""
    b.barrier()
    if b.rank == 1:
        raise KeyError("mine")
    b.allgather(b"")


def killed_after_close(b):
    b.barrier()
    b.close()
    if b.rank == 2:
        time.sleep(0.5)  # the others are in MPI_Finalize
        die()


def exits_after_close(b):
    b.barrier()
    b.close()
    if b.rank == 2:
        time.sleep(0.5)
        os._exit(0)


def twice(b):
    b.barrier()
    b.close()
    with connect() as second:
        exchange(second)


def main():
    if scenario == "exit_early" and os.environ.get("DISTMK_RANK") == "2":
        sys.exit(7)
    argv = [sys.executable, *sys.argv]
    if scenario == "short_thread" and "DISTMK_RANK" not in os.environ:
        made = []
        thread = threading.Thread(target=lambda: made.append(connect(num_ranks, follower_argv=argv)))
        thread.start()
        thread.join()
        time.sleep(0.3)
        b = made[0]
    else:
        b = connect(num_ranks, follower_argv=argv)
    with b:
        try:
            (exchange if scenario == "short_thread" else globals()[scenario])(b)
        except DistmkError as error:
            again = None
            try:
                if isinstance(error, RankLostError):
                    b.barrier()
            except DistmkError as second:
                again = str(second)
            note(b.rank, type=type(error).__name__, text=str(error), code=error.exit_code, again=again)
        except KeyError as error:
            note(b.rank, type="KeyError", text=str(error), code=1)


try:
    main()
except DistmkError as error:
    note("error" + os.environ.get("DISTMK_RANK", "0"), type=type(error).__name__, text=str(error))
    sys.exit(error.exit_code)
