"""Tests of task types: a graph runs on a backend, and the memory that it wrote is compared with its tasks' oracles.

Needs torch.
"""

from __future__ import annotations

import json
import os

from distmk.bootstrap import connect
from distmk.testing.build import Build

__all__ = ["Build", "compare_with_oracle"]


def compare_with_oracle(
    build: Build,
    *,
    backend: str = "host",
    num_ranks: int = 1,
    num_iterations: int = 1,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Run a graph on `num_ranks` ranks, and compare each rank's memory with the results of its tasks' oracles.

    `build(rng)` returns the graph, which is the same on all ranks, or the graph and the contents of some regions that
    tasks read, as arrays. Other regions are random, and all other memory is poison. With several ranks `build` must be
    a function that they can import. rtol, atol: for floating-point numbers, by default as in
    torch.testing.assert_close.

    AssertionError: an element is wrong (with its coordinates); a task writes something that it does not declare, or
    declares less in `accesses` than in `writes`; an event is fired too often or too rarely; or a second launch leaves
    other bits. The text has the seed (by default a new one) that repeats the case.

    UsageError: a task has no oracle, or an oracle that does not fit it.
    """
    # Imported here because they import torch, which takes seconds; some users of this package need only `events`.
    from distmk.testing.case import Case, follower_argv

    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    case = Case(backend, num_iterations, seed, rtol, atol)
    argv = follower_argv(case, build) if num_ranks > 1 else None
    with connect(num_ranks, follower_argv=argv) as bootstrap:
        parts = bootstrap.allgather(json.dumps(case.run(build, bootstrap)).encode())
    wrong = [f"rank {rank}: {text}" for rank, part in enumerate(parts) for text in json.loads(part)]
    if wrong:
        raise AssertionError("\n".join([f"{backend} backend, {num_ranks} ranks, seed={seed}", *wrong]))
