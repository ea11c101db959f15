"""distmk.testing finds what is wrong and where: of bodies that are right, the oracle is what has the planted mistakes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import distmk
from distmk.tasks import Affine, Put, Region, Sine, Slab, Sum, Values
from distmk.testing import compare_with_oracle


def ring(rng: np.random.Generator) -> distmk.Graph:
    """Small tasks of distmk on two ranks, columns of one buffer among their operands."""
    num = int(rng.integers(1, 500))
    graph = distmk.Graph(2, 2)
    a, b, both, total = (graph.buffer(name, cols) for name, cols in zip("abct", (num, num, 2 * num, num), strict=True))
    for rank in range(2):
        graph.add(Sine(rank, "sine", src=a.at(rank), dst=b.at(rank), times=int(rng.integers(0, 5))))
        graph.add(Put(rank, "put", src=b.at(rank), dst=both.at(1 - rank, 0, num)))
        graph.add(Affine(rank, "affine", src=b.at(rank), dst=both.at(rank, num), scale=-2.0, shift=1.0))
    for rank in range(2):
        blocks = both.at(rank, 0, num), both.at(rank, num)
        graph.add(Sum(rank, "sum", blocks=blocks, dst=total.at(rank), accumulates=True))
    return graph


@pytest.mark.whole
def test_ranks_agree_with_the_oracles() -> None:
    compare_with_oracle(ring, num_ranks=2, num_iterations=2)


def test_other_ranks_must_find_the_graph() -> None:
    for build in (lambda rng: ring(rng), functools.partial(ring)):
        with pytest.raises(
            distmk.UsageError, match=r"<(lambda|function).* cannot be imported by the other ranks; define it at the top"
        ):
            compare_with_oracle(build, num_ranks=2)


class Wrong(Affine):
    """Whose oracle, or whose `writes`, are not what the body does."""

    mistake: ClassVar[str] = ""

    def oracle(self, values: Values) -> Mapping[Region, Any]:
        (written,) = self.writes()
        result = torch.cat([values[self.src] * self.scale, torch.zeros(1, 1)], dim=1)[:, : written.cols]
        if self.mistake == "element":
            result[0, 5] += 1e-3
        if self.mistake == "undeclared":
            result = values[self.dst]
        if self.mistake == "size":
            result = result[:, :3]
        if self.mistake == "none":
            return super(Affine, self).oracle(values)
        return {self.src if self.mistake == "regions" else written: result}

    def writes(self) -> tuple[Region, ...]:
        more = {"too little": -1, "too much": 1}.get(self.mistake, 0)
        return (self.dst._replace(end=self.dst.end + more),)


def wrong(rng: np.random.Generator) -> distmk.Graph:
    graph = distmk.Graph(1)
    x, y = graph.buffer("x", 8), graph.buffer("y", 12)
    graph.add(Wrong(0, "double", src=x.at(0), dst=y.at(0, 2, 10), scale=2.0))
    return graph


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (
            "element",
            AssertionError,
            r"rank 0: y\[2:10\]@0, written by double: 1 of 8 wrong\nrow, column \[0, 5\]: got ",
        ),
        ("too little", AssertionError, r"other memory, heap memory of rank 0: . bytes written, first y row 0 byte 3"),
        (
            "too much",
            AssertionError,
            r"accesses, heap memory of rank 0: 4 bytes not in any access, first y row 0 byte 40",
        ),
        ("undeclared", distmk.UsageError, r"asks for y\[2:10\]@0, which is not among what the task reads"),
        ("regions", distmk.UsageError, r"returns x\[0:8\]@0; task double writes y\[2:10\]@0"),
        ("size", distmk.UsageError, r"y\[2:10\]@0 has 1 x 8 elements, not \[1, 3\]"),
        ("none", distmk.UsageError, r"Wrong has no oracle\(\)"),
    ],
)
def test_mistakes_are_found(mistake: str, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "mistake", mistake)
    with pytest.raises(kind, match=text) as caught:
        compare_with_oracle(wrong, seed=7)
    if kind is AssertionError:
        assert re.match("host backend, 1 ranks, seed=7\n", str(caught.value))


def test_tolerance_and_inputs() -> None:
    """Given contents reach the body and the oracle; constants the oracle."""

    class Seen(Affine):
        def oracle(self, values: Values) -> Mapping[Region, Any]:
            assert values[self.src].tolist() == [[1.0, 2.0, 3.0]] and values[self.extra].tolist() == [[5.0, 6.0]]
            return {self.dst: values[self.src] * 2.0 + 0.05}

        extra: Slab

    def build(rng: np.random.Generator) -> tuple[distmk.Graph, Mapping[Region, Any]]:
        graph = distmk.Graph(1)
        x, y = graph.buffer("x", 3), graph.buffer("y", 3)
        task = Seen(0, "seen", src=x.at(0), dst=y.at(0), scale=2.0)
        object.__setattr__(task, "extra", graph.constant("c", 0, np.array([5.0, 6.0], np.float32)))
        graph.add(task)
        return graph, {x.at(0): np.array([1.0, 2.0, 3.0])}

    compare_with_oracle(build, atol=0.1)
    with pytest.raises(AssertionError, match="3 of 3 wrong"):
        compare_with_oracle(build, atol=0.01, rtol=0.0)
