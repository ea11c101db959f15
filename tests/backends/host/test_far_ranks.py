"""Ranks on virtual nodes of the host twin, whose puts come late and out of order; and the variables that ask for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.helpers import Runner, with_ranks

pytestmark = pytest.mark.timeout(120)


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
