"""Summaries of repeated measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median, percentiles and range of `count` measurements, in the unit of the field that holds it."""

    median: float
    p25: float
    p75: float
    p99: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise `values`. ValueError: there are none."""
        if not len(values):
            raise ValueError("no measurements")
        p25, median, p75, p99 = (float(each) for each in np.percentile(values, [25, 50, 75, 99]))
        return Spread(median, p25, p75, p99, float(min(values)), float(max(values)), len(values))

    def scaled(self, by: float) -> Spread:
        """All values times `by`, for another unit or a part of the whole."""
        scaled = {name: by * value for name, value in vars(self).items() if name != "count"}
        return dataclasses.replace(self, **scaled)


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """y at `x`, linear in log(x) between the points and constant outside. `xs` ascend."""
    return float(np.interp(math.log(x), np.log(xs), ys))
