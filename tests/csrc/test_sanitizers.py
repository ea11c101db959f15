"""The runtime under ThreadSanitizer and AddressSanitizer, all ranks in one process: only planted bugs are reported."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import graphs
from support.ranks_in_process import assert_clean, run_ranks, tiny_decode, tool

from distmk.errors import UsageError
from distmk.program.program import Program, compile_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

# Schedulers in threads of their own or in the workers' idle loops; all iterations in one launch, or two iterations in
# each.
MODES = ((), ("--ride",), ("--ride", "--cut", "2"))
DELAY = ("--delay", "300,1,7")
FAR = ("--far", "1")
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


DECODES = [(*size, launch) for launch in ("massive", "spread") for size in SIZES if launch == "massive" or size[1] > 1]


@pytest.fixture(scope="module", params=DECODES, ids=lambda decode: "{}x{}-{}".format(*decode))
def decode(request: pytest.FixtureRequest) -> Program:
    return compile_graph(tiny_decode(*request.param))


@pytest.mark.parametrize("shape", ["ring", "all_reduce", "pipeline", "handed_out", "spread"])
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_small_graphs(sanitizer: str, shape: str, tmp_path: Path) -> None:
    for num_ranks, num_workers in ((1, 2), (2, 1), (3, 2), (4, 1)):
        program = compile_graph(graphs.SHAPES[shape](num_ranks, num_workers))
        for options in MODES:
            assert_clean(run_ranks(tool(sanitizer), program, tmp_path, *options), num_ranks)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_decode(sanitizer: str, decode: Program, tmp_path: Path) -> None:
    """Prompts in chunks, sequences that come, go and are preempted, and attention as a massive or a spread task."""
    for options in MODES:
        done = run_ranks(tool(sanitizer), decode, tmp_path, *options)
        assert_clean(done, decode.num_ranks)
        assert "put back: 1\n" in done.stdout, done.stdout


def constrained_tokens(stdout: str) -> tuple[int, int, int]:
    """Tokens of constrained requests, those that were not allowed, and rows that were repeated."""
    found = re.search(r"constrained tokens: (\d+), not allowed: (\d+), repeated rows: (\d+)", stdout)
    assert found, stdout
    num_tokens, num_wrong, num_repeated = map(int, found.groups())
    return num_tokens, num_wrong, num_repeated


@pytest.mark.parametrize("size", [(1, 1), (2, 2)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_masks(size: tuple[int, int], tmp_path: Path) -> None:
    """The host writes masks while workers read them. With their positions stored too early, the race is reported."""
    program = compile_graph(tiny_decode(*size))
    done = run_ranks(tool("thread"), program, tmp_path, "--constrained")
    assert_clean(done, size[0])
    num_tokens, num_wrong, num_repeated = constrained_tokens(done.stdout)
    assert num_tokens > 10 and num_wrong == 0 and num_repeated > 0, done.stdout
    done = run_ranks(tool("thread"), program, tmp_path, "--constrained", "--early-stamp")
    assert done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stdout, done.stdout[-3000:]


def random_programs(seed: int, count: int) -> Iterator[Program]:
    random_ = random.Random(seed)
    while count:
        try:
            program = compile_graph(graphs.random_graph(random_))
        except UsageError:
            continue  # a graph that cannot be ordered is refused
        count -= 1
        yield program


def test_random_graphs(tmp_path: Path) -> None:
    """The waits that the compiler leaves out really are implied by others, with and without pointers between ranks."""
    seed = random.randrange(2**32)
    for number, program in enumerate(random_programs(seed, 30)):
        print(f"seed {seed}, program {number}")
        options = (*MODES[number % 3], *(DELAY if number % 4 else ()))
        assert_clean(run_ranks(tool("thread"), program, tmp_path, *options, iterations=8), program.num_ranks)


@pytest.mark.parametrize("size", [(2, 2), (3, 1)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("far", [DELAY, FAR, FAR + DELAY], ids=["delayed", "network", "both"])
def test_far_ranks(far: tuple[str, ...], size: tuple[int, int], tmp_path: Path) -> None:
    """Each rank is on a virtual node of its own: puts come late and overtake each other, or go through sockets."""
    across_hosts = tiny_decode(*size, host_sizes=(1,) * size[0])
    for graph in (graphs.ring(*size), graphs.all_reduce(*size), tiny_decode(*size), across_hosts):
        program = compile_graph(graph)
        assert_clean(run_ranks(tool("thread"), program, tmp_path, *far, iterations=10), size[0])


def test_hosts_of_two_ranks(tmp_path: Path) -> None:
    """Some ranks share memory and others are reached through sockets, also in a launch in pieces."""
    for graph in (graphs.ring(4, 1), tiny_decode(3, 2)):
        program = compile_graph(graph)
        for sanitizer in ("thread", "address"):
            done = run_ranks(tool(sanitizer), program, tmp_path, "--far", "2", "--ride", "--cut", "2", iterations=10)
            assert_clean(done, program.num_ranks)


@pytest.mark.parametrize("shape", ["ring", "all_reduce"])
def test_missing_release_is_reported(shape: str, tmp_path: Path) -> None:
    program = compile_graph(graphs.SHAPES[shape](2, 1))
    for far in ((), FAR):
        done = run_ranks(tool("thread"), program, tmp_path, "--missing-release", *far)
        assert done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stdout, done.stdout[-3000:]


def drop_waits(program: Program, rank: int, op: str) -> None:
    part = program.ranks[rank]
    dropped = 0
    for desc, name in zip(part.tasks, part.task_names, strict=True):
        if name == op:
            dropped += desc.num_waits
            desc.num_waits = 0
    assert dropped, f"{op} has no waits: {sorted(set(part.task_names))}"


def assert_reported(program: Program, folder: Path) -> None:
    """Fail unless a race is reported. A task without its waits may end before the others begin, so try several times."""
    for iterations in (500, 2000, 8000, 8000, 8000):
        done = run_ranks(tool("thread"), program, folder, iterations=iterations)
        if done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stdout:
            return
    pytest.fail(f"no race was reported:\n{done.stdout[-3000:]}")


@pytest.mark.parametrize(
    ("shape", "rank", "op"),
    [
        ("ring", 1, "scale"),
        ("all_reduce", 0, "sum1"),
        ("pipeline", 0, "stage0"),
        ("handed_out", 0, "massive"),
        ("spread", 0, "massive"),
        ("spread", 1, "between"),
    ],
)
def test_dropped_wait_is_reported(shape: str, rank: int, op: str, tmp_path: Path) -> None:
    program = compile_graph(graphs.SHAPES[shape](2, 2))
    drop_waits(program, rank, op)
    assert_reported(program, tmp_path)


@pytest.mark.parametrize("op", ["layer0.down.reduce", "layer1.combine", "layer1.attention"])
def test_dropped_wait_in_decode_is_reported(op: str, tmp_path: Path) -> None:
    program = compile_graph(tiny_decode(2, 2, "spread" if op == "layer1.attention" else "massive"))
    drop_waits(program, 1, op)
    assert_reported(program, tmp_path)
