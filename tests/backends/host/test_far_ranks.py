"""Ranks on virtual nodes of the host twin: over the network, or by puts that come late and out of order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import ROOT, Runner, with_ranks

pytestmark = pytest.mark.timeout(120)

ELSEWHERE = """
import sys
from pathlib import Path
import distmk
from distmk.backends.host import backend, segments
from distmk.errors import UsageError

class Emulated(backend.EmulatedBackend):
    load_library = staticmethod(backend.load_runtime)  # is not run

with distmk.connect(2, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
    if bootstrap.rank == 1:
        segments.FOLDER = Path(sys.argv[1])
    sys.path.insert(0, "%s")
    from support import graphs
    from distmk.program.program import compile_graph
    try:
        Emulated(compile_graph(graphs.ring(2, 1)).ranks[bootstrap.rank], bootstrap)
    except UsageError as error:
        if bootstrap.rank == 0:
            print(error)
""" % (ROOT / "tests")


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


def test_virtual_nodes_decode_the_same(runner: Runner, command: Callable[..., list[str]]) -> None:
    """The same tokens over the network, again over the network, and by delayed puts, also if those come first."""
    argv = [*command(tokens=12), "--prompt-ids", "7,8,9", "--json"]
    far, delayed = "DISTMK_VIRTUAL_NODE_SIZE", "DISTMK_FAULT_DELAY_PUTS"
    for num_ranks, runs in (
        (2, ({far: "1"}, {far: "1", delayed: "200,1,5"})),
        (4, ({far: "2"}, {far: "2"}, {delayed: "200,2,5"})),
    ):
        found = [runner.run(with_ranks(num_ranks)(argv), variables) for variables in runs]
        assert not any(done.status for done in found), found
        tokens = [[o["token_ids"] for o in done.objects()] for done in found]
        assert tokens[1:] == tokens[:-1] and len(tokens[0][0]) == 12


def test_virtual_nodes_are_checked(runner: Runner, command: Callable[..., list[str]]) -> None:
    done = runner.run(with_ranks(2)(command(tokens=4)), {"DISTMK_VIRTUAL_NODE_SIZE": "x"})
    assert done.status == 2 and len(done.own_lines) == 1 and "is no number of ranks" in done.own_lines[0], done.stderr


def test_the_emulator_needs_one_machine(runner: Runner, tmp_path: Path) -> None:
    script = runner.folder / "job.py"
    script.write_text(ELSEWHERE)
    done = runner.run([sys.executable, str(script), str(tmp_path)])
    assert done.stdout == (
        "the emulator runs on one machine, but rank 1 shares no memory with rank 0; use --backend host\n"
    ), done.stderr
