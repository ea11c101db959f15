"""The fast run has a few cases of every test that starts no process, and all tests marked `fast`."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from support import tiers


@dataclass(frozen=True)
class Item:
    """What `tiers` asks of a test."""

    nodeid: str
    marks: frozenset[str] = frozenset()
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(2,)) if name in self.marks else None


def chosen(items: list[Any], seed: str = "1") -> list[str]:
    return [item.nodeid for item in tiers.choose(items, seed)]


def test_tests_that_start_processes_are_left_out() -> None:
    items = [Item("a"), Item("b", fixturenames=("rng", "runner")), Item("c", frozenset({"fast"}), ("runner",))]
    items += [Item(f"d[{name}]", frozenset({name})) for name in ("whole", "slow", "gpu", "multigpu")]
    assert chosen(items) == ["a", "c"]


def test_a_few_cases_are_drawn_of_each_function() -> None:
    items = [Item(f"{name}[{case}]") for name in ("a", "b") for case in range(9)]
    draws = [chosen(items, str(seed)) for seed in range(20)]
    assert all(len(draw) == 2 * tiers.NUM_CASES and draw == sorted(draw) for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 10 and chosen(items, "3") == draws[3]


def test_cases_that_are_marked_run_all_and_alone() -> None:
    items = [Item(f"a[{case}]", frozenset({"fast"} if case % 2 else ())) for case in range(9)]
    assert chosen(items) == ["a[1]", "a[3]", "a[5]", "a[7]"]


def test_cases_of_functions_that_are_marked_are_drawn() -> None:
    marked = [Item(f"a[{case}]", frozenset({"drawn"})) for case in range(9)]
    others = [Item(f"b[{case}]") for case in range(4)]
    on_gpus = [Item(f"c[{case}]", frozenset({"drawn", "gpu"})) for case in range(4)]
    items: list[Any] = [*marked, *others, *on_gpus]
    draws = [[item.nodeid for item in tiers.choose_drawn(items, str(seed))] for seed in range(20)]
    for draw in draws:
        assert len(draw) == 2 + 4 + 4 and draw == sorted(draw), draw
    assert {name for draw in draws for name in draw} == {item.nodeid for item in items}


def test_all_processes_of_a_run_draw_the_same() -> None:
    class Worker:
        def __init__(self) -> None:
            self.workerinput = {"testrunuid": "7"}

    assert tiers.seed_of(Worker()) == "7"  # type: ignore[arg-type]
