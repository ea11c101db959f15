"""What a run leaves behind, or finds: shared memory, and launches that nobody finished."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import Runner, abandoned_segments, made_segment, under_mpirun, with_ranks

from distmk.backends.host.shm import SharedHeap, remove_leftovers
from distmk.bootstrap.single import SingleBootstrap
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)


def test_leftovers(runner: Runner, command: Callable[..., list[str]]) -> None:
    """A dead run's segment is removed by the next run; a living one's is not, and neither harms."""
    dead, living = made_segment("dead"), made_segment("living")
    try:
        dead.write_bytes(b"x" * 8192)
        with living.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = runner.run([*command(tokens=4), "--ranks", "2"])
            assert done.status == 0, done.stderr
            assert not dead.exists() and living.exists()
        assert remove_leftovers() >= 1 and not living.exists() and not abandoned_segments()
    finally:
        dead.unlink(missing_ok=True)
        living.unlink(missing_ok=True)


def test_what_is_removed(tmp_path: Path) -> None:
    dead, living, other = (tmp_path / f"distmk-{owner}-0" for owner in (f"{os.getuid()}-a", f"{os.getuid()}-b", "x-c"))
    for path in (dead, living, other):
        path.write_bytes(b"x")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_leftovers(tmp_path) == 1
        assert not dead.exists() and living.exists() and other.exists()
    assert remove_leftovers(tmp_path) == 1 and not living.exists()


def test_no_room_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"/dev/shm has \d+ MiB free, a rank's heap needs 3 MiB; make room"):
        SharedHeap(SingleBootstrap(5.0), 3 << 20)
    assert not abandoned_segments()


def test_no_room(runner: Runner, command: Callable[..., list[str]]) -> None:
    """With a /dev/shm of 16 KiB, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    mount = "mount -t tmpfs -o size=16k tmpfs /dev/shm"
    if not unshare or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = runner.run([unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command(tokens=4), "--ranks", "2"])
    assert done.status == 2 and len(done.own_lines) == 1, done.stderr
    assert re.search(r"/dev/shm has \d+ MiB free, a rank's heap needs \d+ MiB; make room", done.own_lines[0]), (
        done.stderr
    )


# Late and unordered puts


def test_far_ranks_decode_the_same(runner: Runner, command: Callable[..., list[str]]) -> None:
    argv = [*command(tokens=12), "--prompt-ids", "7,8,9", "--json"]
    plain = runner.run(argv)
    for num_ranks, node_size in ((2, 1), (3, 2)):
        fault = {"DISTMK_FAULT_DELAY_PUTS": f"400,{node_size},5"}
        far = runner.run(with_ranks(num_ranks)(argv), fault)
        assert far.status == 0, far.stderr
        assert [o["token_ids"] for o in far.objects()] == [o["token_ids"] for o in plain.objects()]


def test_faults_are_checked(runner: Runner, command: Callable[..., list[str]]) -> None:
    for name, text in (("DELAY_PUTS", "100,0,1"), ("DROP_SIGNAL", "1,2,3")):
        done = runner.run(command(tokens=4), {f"DISTMK_FAULT_{name}": text})
        assert done.status == 2 and f"DISTMK_FAULT_{name}={text!r}; expected" in done.stderr, done.stderr


def test_virtual_nodes_are_not_the_host_twins(runner: Runner, command: Callable[..., list[str]]) -> None:
    for size, text in (
        ("1", "DISTMK_VIRTUAL_NODE_SIZE is for GPUs and --backend emulated"),
        ("x", "is no number of ranks"),
    ):
        done = runner.run(with_ranks(2)(command(tokens=4)), {"DISTMK_VIRTUAL_NODE_SIZE": size})
        assert done.status == 2 and len(done.own_lines) == 1 and text in done.own_lines[0], done.stderr


# The Python API

STREAMS = """
import sys
from distmk import LLM, SamplingParams

def main(model, ranks):
    options = dict(load_format="dummy", tensor_parallel_size=ranks or None, num_workers=1, max_model_len=30000)
    few, many = SamplingParams(max_tokens=6, ignore_eos=True), SamplingParams(max_tokens=20000, ignore_eos=True)
    outputs = []
    for _ in range(2):  # a second LLM after the first was closed
        with LLM(model, **options) as llm:
            def generate():
                return [list(o.outputs[0].token_ids) for o in llm.generate([[1, 2, 3], [4, 5]], few)]
            outputs.append(generate())
            for number, token in enumerate(llm.stream([1, 2, 3], many)):
                if number == 3:
                    break
            outputs.append(generate())
            for number, token in enumerate(llm.stream([1, 2, 3], few)):
                if number == 5:  # the last one: the launch is over, or nearly
                    break
            outputs.append(generate())
            held = llm.stream([1, 2, 3], many)  # one that is left lying about
            taken = next(held, None)
            llm.peak_memory_bytes()
            outputs.append(generate())
            assert len(list(held)) < 1000  # what had come before it was stopped
            held = llm.stream([1, 2, 3], many)
            taken = next(held, None)
        rank = llm.rank
    if rank == 0:
        assert [len(ids) for ids in outputs[0]] == [6, 6] and all(o == outputs[0] for o in outputs), outputs
    print("done", flush=True)

main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_streams_left_early(runner: Runner, endless: Path, num_ranks: int) -> None:
    done = runner.run([sys.executable, "-c", STREAMS, str(endless), str(num_ranks)])
    assert (done.status, done.stdout) == (0, "done\n"), done.stderr
    assert all(line.startswith("distmk: warning") for line in done.stderr.splitlines()), done.stderr


def test_streams_left_early_under_mpirun(runner: Runner, endless: Path) -> None:
    done = runner.run(under_mpirun(2)([sys.executable, "-c", STREAMS, str(endless), "0"]))
    assert done.status == 0 and sorted(done.stdout.split()) == ["done", "done"], done.stderr
