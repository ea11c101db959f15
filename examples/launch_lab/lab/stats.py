"""Medians and how far the rest is from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Of `count` measurements, all in the unit that the name of the field says."""

    median: float
    p25: float
    p75: float
    p99: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """ValueError where there are none."""
        if not len(values):
            raise ValueError("no measurements")
        p25, median, p75, p99 = (float(each) for each in np.percentile(values, [25, 50, 75, 99]))
        return Spread(median, p25, p75, p99, float(min(values)), float(max(values)), len(values))

    def scaled(self, by: float) -> Spread:
        """In another unit, or of a part."""
        scaled = {name: by * value for name, value in vars(self).items() if name != "count"}
        return dataclasses.replace(self, **scaled)


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """y at `x` on straight lines between the points over the logarithm of x, level outside. `xs` ascend."""
    return float(np.interp(math.log(x), np.log(xs), ys))
