"""What a task type declares of itself: contradictions are refused, and csrc/abi.h says the same as Python."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from support.helpers import ROOT

from distmk.graph.task import EarlyCompletion, Task, task_type
from distmk.tasks import TASK_TYPES, Sum

UNUSED_ID = 999
IN_PYTHON_ONLY = {"deep_lookahead", "on_device", "takes_packed_weights", "uses_pipeline", "writes_peers"}
HEADER = (ROOT / "csrc" / "abi.h").read_text()


class Args(ctypes.Structure):
    _fields_ = [("src", ctypes.c_uint64), ("batch", ctypes.c_uint64)]


@pytest.mark.parametrize(
    ("traits", "refusal"),
    [
        ({"completes_early": EarlyCompletion("polls", 8)}, "its traits need arguments polls$"),
        ({"resets_rows": True}, "its traits need arguments lamport_reset$"),
        ({"hot_variants": 1}, r"must poll its inputs \(polls_inputs\)$"),
    ],
)
def test_traits_that_contradict_each_other(traits: dict[str, Any], refusal: str) -> None:
    @dataclass(frozen=True, eq=False)
    class Wrong(Task):
        Args: ClassVar[type[ctypes.Structure]] = Args

    for name, value in traits.items():
        setattr(Wrong, name, value)
    with pytest.raises(TypeError, match=f"^task type wrong: .*{refusal}"):
        task_type(UNUSED_ID, "wrong")(Wrong)
    assert UNUSED_ID not in TASK_TYPES


@pytest.mark.parametrize(
    ("type_id", "num_bytes", "refusal"),
    [
        (Sum.type_id, 8, "id 3 is taken by sum$"),
        (UNUSED_ID, 161, "its arguments take 161 bytes; a descriptor has 160$"),
    ],
)
def test_ids_and_arguments_that_do_not_fit(type_id: int, num_bytes: int, refusal: str) -> None:
    @dataclass(frozen=True, eq=False)
    class Wrong(Task):
        Args: ClassVar[type[ctypes.Structure]] = type(
            "WrongArgs", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_uint8 * num_bytes)]}
        )

    with pytest.raises(TypeError, match=f"^task type wrong: {refusal}"):
        task_type(type_id, "wrong")(Wrong)
    assert TASK_TYPES[Sum.type_id] is Sum and UNUSED_ID not in TASK_TYPES


def traits_in_header(kind: type[Task]) -> str:
    begin = HEADER.index(f"struct TaskTraits<TaskType::{kind.type_name.upper()}>")
    return HEADER[begin : HEADER.index("};", begin)]


@pytest.mark.parametrize("kind", TASK_TYPES.values(), ids=lambda kind: kind.type_name)
def test_header_has_the_traits_of_every_type(kind: type[Task]) -> None:
    text = traits_in_header(kind)
    flags = [name for name, value in vars(Task).items() if isinstance(value, bool)]
    assert "polls_inputs" in flags
    declared = {flag.upper() for flag in flags if getattr(kind, flag)} - {each.upper() for each in IN_PYTHON_ONLY}
    assert set(re.findall(r"bool (\w+) = true", text)) == declared
    assert ("may_complete_early" in text) == (kind.completes_early is not None)


def test_code_paths_do_not_overlap() -> None:
    """From 1 on without a gap, as many for each type as it has variants; the numbers behind them are the cold paths."""
    found = []
    for kind in TASK_TYPES.values():
        if match := re.search(r"CODE_PATH = (\d+)u, HOT_VARIANTS = (\d+)u", traits_in_header(kind)):
            assert int(match[2]) == kind.hot_variants
            found += range(int(match[1]), int(match[1]) + kind.hot_variants)
    match = re.search(r"NUM_HOT_PATHS = (\d+)u", HEADER)
    assert match and sorted(found) == list(range(1, int(match[1]) + 1))


def test_early_completion_is_declared_once() -> None:
    """The checker and the kernel ask the same argument."""
    assert Sum.completes_early
    field = Sum.completes_early.field
    assert f"return args.{field};" in traits_in_header(Sum)
    assert f"EARLY_ROWS = {Sum.completes_early.rows}u" in traits_in_header(Sum)
    for value in (0, 1):
        assert Sum.skips_waits(Sum.Args(**{field: value})) == bool(value)
