"""The work of the rungs, sines of sines, and the reference for it: float64 on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.errors import LabError

NUM_SINES = 20  # per element of a short kernel, as in lab.cuh
NUM_KERNELS = 20  # per step
PERIOD = 1021  # period of the inputs; prime, so that a misplaced element shows
# Absolute, of float32 results. Values are at most 1 and a sine never increases an error, so the rounding errors of 400
# sines add up to less. One sine too few or too many changes the largest results by 10 times as much.
TOLERANCE = 1e-5

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@functools.cache
def _base() -> Floats:
    return np.random.default_rng(5).uniform(-1, 1, PERIOD).astype(np.float32)


def inputs(num: int) -> Floats:
    """`num` inputs in [-1, 1], of period PERIOD."""
    return np.resize(_base(), num)


def _sines(values: Doubles, count: int) -> Doubles:
    for _ in range(count):
        values = np.sin(values)
    return values


@functools.cache
def _reference(num_sines: int) -> Doubles:
    """One period of the inputs after `num_sines` sines."""
    return _sines(_base().astype(np.float64), num_sines)


def expected(num: int, num_sines: int) -> Doubles:
    """`inputs(num)` after `num_sines` sines."""
    return np.resize(_reference(num_sines), num)


def expected_items(counts: npt.NDArray[Any], item_size: int) -> Doubles:
    """[items, item_size]: consecutive items of the inputs, item i after `counts[i]` sines."""
    where = np.arange(len(counts) * item_size).reshape(len(counts), item_size) % PERIOD
    out, values, done = np.empty(where.shape), _base().astype(np.float64), 0
    for count in map(int, np.unique(counts)):
        values, done = _sines(values, count - done), count
        out[counts == count] = values[where[counts == count]]
    return out


def check(what: str, got: npt.NDArray[Any], want: Doubles, tolerance: float = TOLERANCE) -> float:
    """The largest absolute error. LabError: an error above `tolerance`, or a NaN; the message has the first index."""
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
