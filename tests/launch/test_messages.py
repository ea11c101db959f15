"""What ranks tell each other is data: it is checked on arrival, and never executed."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import graphs
from support.helpers import ROOT

from distmk.abi import Abort
from distmk.backends.launch_block import ENTRY, StuckWait
from distmk.bootstrap.agreement import agree, agree_same
from distmk.bootstrap.messages import from_json, pack, to_json, unpack
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine.commands import _read as _read_command
from distmk.engine.outcome import Outcome, gather_outcomes
from distmk.errors import DistmkError
from distmk.program.program import compile_graph
from distmk.trace.collect import collect

EXECUTING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing"}


def executes(tree: ast.AST) -> list[str]:
    """Imports and calls of a module that can run what they read."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "eval", "exec"):
            found.append(ast.unparse(node.func))
            continue
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
            continue
        else:
            continue
        found += [name for name in names if name.split(".")[0] in EXECUTING]
    return found


def test_nothing_can_unpickle() -> None:
    assert executes(ast.parse("import os, pickle\nfrom multiprocessing.connection import wait\ntorch.load(f)"))
    sources = [*(ROOT / "distmk").rglob("*.py"), *(ROOT / "examples" / "launch_lab" / "lab").rglob("*.py")]
    assert len(sources) > 100
    found = {str(path.relative_to(ROOT)): names for path in sources if (names := executes(ast.parse(path.read_text())))}
    assert not found


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Hostile(SingleBootstrap):
    """A job of two ranks; rank 1 answers every exchange with `answer`."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(1.0)
        self.world_size = 2
        self.answer = answer

    def allgather(self, payload: bytes) -> list[bytes]:
        return [payload, self.answer]


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_answers_of_a_hostile_rank_are_errors_that_name_it(tmp_path: Path) -> None:
    program = compile_graph(graphs.all_reduce(2, 2))
    marker = tmp_path / "executed"
    outcome = Outcome(Abort.HANG, (StuckWait(1, 2, True, 3, "t", "e", 4, 5),), 6, False)
    good = to_json({"reason": 1, "stuck": [], "iterations": 2, "left": False})
    header = program.ranks[1].header
    num_runners = header.num_workers + header.num_schedulers
    entry = np.full(1, 2**32 - 1, np.uint32).repeat(ENTRY.itemsize // 4).tobytes()
    answers = [
        pickle.dumps(Bomb(marker)),
        b"",
        b"\xff" * 100,
        nested(100_000),
        b"1" * 5000,
        to_json({"type": 1}),
        good.replace(b"1", b"99", 1),
        good.replace(b"2", b'"2"'),
        good.replace(b"[]", b'[{"iteration": 1}]'),
        b"\xff" * 8 + b"x",
        pack([bytes(16), *[b""] * (num_runners - 1)]),
        pack([bytes(16), *[b""] * (num_runners - 1), b"x"]),
        pack([bytes(16), *[b""] * (num_runners - 1), entry]),
        pack([bytes(15), *[b""] * num_runners]),
    ]
    for answer in answers:
        hostile = Hostile(answer)
        calls = [
            lambda b=hostile: gather_outcomes(b, outcome),
            lambda b=hostile: agree(b, lambda: None),
            lambda b=hostile: agree_same(b, "models", {"a": "b"}),
            lambda b=hostile: collect(program, b, []),
            lambda a=answer: _read_command(a),
        ]
        for call in calls:
            with pytest.raises(
                DistmkError, match=r"rank \d sent no valid .*; start the same version of distmk on every"
            ):
                call()
    assert not marker.exists()
    pickle.loads(answers[0])
    assert marker.exists()  # so it would have been, had one been unpickled


def test_outcomes_survive_the_journey() -> None:
    outcome = Outcome(Abort.HANG, (StuckWait(1, 2, True, 3, "t", "e", 4, 5),), 6, False)
    assert gather_outcomes(SingleBootstrap(1.0), outcome) == [outcome]


def test_shapes() -> None:
    shape = {"a": (None, int), "b": [str], "c": {str: float}}
    good = {"a": None, "b": ["x"], "c": {"any": 1.5}}
    assert from_json(to_json(good), "rank 1", "test", shape) == good
    for bad in (
        good | {"a": True},
        good | {"b": "x"},
        good | {"b": [1]},
        good | {"c": {"any": "1"}},
        good | {"d": 1},
        {"a": 1},
        [],
        None,
    ):
        with pytest.raises(DistmkError, match="rank 1 sent no valid test"):
            from_json(to_json(bad), "rank 1", "test", shape)


def test_unpack_checks_sizes() -> None:
    for data, count in (
        (b"\x01", 1),
        (pack([b"ab"])[:-1], 1),
        (pack([b"ab"]), 2),
        (pack([b"a", b"b"]), 1),
        (b"\xff" * 9, 1),
    ):
        with pytest.raises(DistmkError, match="rank 2 sent no valid message of several parts"):
            unpack(data, "rank 2", count)
