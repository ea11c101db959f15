"""What the rungs compute, and the reference that each is checked against: sines of sines, in float64 on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.errors import LabError

NUM_SINES = 20  # of a short kernel, as in lab.cuh
NUM_KERNELS = 20  # of a step
PERIOD = 1021  # inputs repeat; a prime, so that an element in another's place shows
# Of float32 results, absolute. Values are at most 1 and sines never part them further, so that the rounding of 400 of
# them adds up to less; one sine too few or too many changes the largest results by 10 times as much.
TOLERANCE = 1e-5

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@functools.cache
def _base() -> Floats:
    return np.random.default_rng(5).uniform(-1, 1, PERIOD).astype(np.float32)


def inputs(num: int) -> Floats:
    """`num` elements, in [-1, 1]."""
    return np.resize(_base(), num)


def _sines(values: Doubles, count: int) -> Doubles:
    for _ in range(count):
        values = np.sin(values)
    return values


@functools.cache
def _reference(num_sines: int) -> Doubles:
    """Of one period."""
    return _sines(_base().astype(np.float64), num_sines)


def expected(num: int, num_sines: int) -> Doubles:
    """What `num_sines` sines make of `inputs(num)`."""
    return np.resize(_reference(num_sines), num)


def expected_items(counts: npt.NDArray[Any], item_size: int) -> Doubles:
    """[items, item_size]: item i after `counts[i]` sines; all of them lie one after another in `inputs`."""
    where = np.arange(len(counts) * item_size).reshape(len(counts), item_size) % PERIOD
    out, values, done = np.empty(where.shape), _base().astype(np.float64), 0
    for count in map(int, np.unique(counts)):
        values, done = _sines(values, count - done), count
        out[counts == count] = values[where[counts == count]]
    return out


def check(what: str, got: npt.NDArray[Any], want: Doubles, tolerance: float = TOLERANCE) -> float:
    """The largest error. LabError where that is more than `tolerance`, or not a number; it names the place."""
    if got.size != want.size:
        raise LabError(f"{what}: {got.size} results, expected {want.size}")
    got, want = got.reshape(-1), want.reshape(-1)
    errors = np.abs(got.astype(np.float64) - want)
    wrong = np.flatnonzero(~(errors <= tolerance))
    if len(wrong):
        first = int(wrong[0])
        raise LabError(
            f"{what}: {len(wrong)} of {got.size} results are wrong, first at {first}: {got[first]:.7g}, "
            f"expected {want[first]:.7g} to within {tolerance:g}"
        )
    return float(errors.max(initial=0.0))
