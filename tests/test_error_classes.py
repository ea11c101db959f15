"""Errors cross processes: a pool of processes pickles them, and waits for ever for one that cannot be unpickled."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

import distmk
from distmk.errors import DistmkError, HangError, WaitRecord

EXAMPLES = {HangError: HangError(WaitRecord(1, 2, "task", "event", 3, 0), 1.5)}
"""Errors with constructors of their own."""


def error_types() -> list[type[DistmkError]]:
    """All types of errors that the package defines."""
    root = Path(distmk.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if re.search(r"^class \w+\(\w*Error\)", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(("distmk", *path.relative_to(root).with_suffix("").parts)))

    def below(kind: type[DistmkError]) -> Iterator[type[DistmkError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return sorted(set(below(DistmkError)), key=lambda kind: kind.__name__)


def check_same(got: DistmkError, want: DistmkError) -> None:
    assert type(got) is type(want)
    assert (str(got), got.args, got.exit_code, vars(got)) == (str(want), want.args, want.exit_code, vars(want))


def test_every_type_is_pickled_and_copied_whole() -> None:
    kinds = error_types()
    assert len(kinds) >= 14
    for kind in kinds:
        assert kind in EXAMPLES or "__init__" not in vars(kind), f"{kind}: give an example of it"
        error = EXAMPLES.get(kind) or kind("what was wrong; what to do")
        error.exit_code = 77
        for version in range(pickle.HIGHEST_PROTOCOL + 1):
            check_same(pickle.loads(pickle.dumps(error, version)), error)
        check_same(copy.copy(error), error)
        check_same(copy.deepcopy(error), error)


def raise_hang(deadline_s: float) -> None:
    raise HangError(WaitRecord(1, 2, "task", "event", 3, 0), deadline_s)


@pytest.mark.timeout(60)
def test_a_pool_gets_a_hang_error() -> None:
    with Pool(1) as pool, pytest.raises(HangError, match="no progress for 2 s: rank 1 worker 2") as raised:
        pool.apply_async(raise_hang, (2.0,)).get(timeout=30)
    assert raised.value.record.want == 3 and raised.value.deadline_s == 2.0
