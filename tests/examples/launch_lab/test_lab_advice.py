"""Predictions and advice, on a report whose costs are known."""

from __future__ import annotations

import dataclasses

import pytest
from lab_reports import COSTS, FEW, MANY, PREPARE_US, PURE_US, report

from distmk.errors import UsageError
from lab.advise import Advice, advise, fixed, lines, predict
from lab.stats import Spread, interpolate


@pytest.mark.parametrize("rung", COSTS)
@pytest.mark.parametrize("count", [1, 7, 20, 1000])
@pytest.mark.parametrize("duration_us", [0.5, 2.0, 7.0, 33.0, 100.0, 400.0])
def test_predictions_are_the_costs_that_went_in(rung: str, count: int, duration_us: float) -> None:
    """Every rung of the report adds the same at all measured durations, so it does between and beyond them."""
    step_us, added = COSTS[rung]
    made = predict(report(), rung, count, duration_us, varying=False)
    assert made is not None
    assert made.step_us == pytest.approx(step_us + count * (duration_us + added))
    assert made.overhead == pytest.approx((step_us + count * added) / (count * duration_us))


def test_varying_shapes() -> None:
    """A graph is captured again for every step; a task graph does not fit."""
    of = report()
    fixed_shapes, varying = (predict(of, "3", 40, 5.0, each) for each in (False, True))
    assert fixed_shapes and varying
    assert varying.step_us - fixed_shapes.step_us == pytest.approx(2 * PREPARE_US)
    assert predict(of, "12", 40, 5.0, True) is None
    assert predict(of, "5", 40, 5.0, True) == predict(of, "5", 40, 5.0, False)


def chosen(found: Advice) -> tuple[str, str]:
    return found.any_reads.rung, found.own_reads.rung


@pytest.mark.parametrize(
    ("count", "duration_us", "varying", "want"),
    [
        (20, 100.0, False, ("2", "2")),  # (8 + 60) / 2000 is below 5 %
        (1000, 61.0, False, ("2", "2")),  # 3 of 61
        (1000, 40.0, False, ("2", "3")),  # 3 of 40 is too much; but 43 is within 5 % of 41, and 41 of 39.5
        (1000, 2.0, False, ("3", "4")),  # 3 against fused 1.5
        (20, 2.0, False, ("3", "4")),
        (20, 2.0, True, ("7", "4")),  # capturing costs 200; device launches 89, the barrier 77
        (1, 100.0, True, ("2", "4")),  # 111 is within 5 % of the barrier's 108.5, not of fused 105.5
    ],
)
def test_rules(count: int, duration_us: float, varying: bool, want: tuple[str, str]) -> None:
    found = advise(report(), count, duration_us, varying)
    told = {each.rung: each.step_us for each in found.predictions}
    assert chosen(found) == want, told
    any_reads = {rung: us for rung, us in told.items() if rung not in ("1", "4", "6")}
    assert found.any_reads.step_us <= 1.05 * min(any_reads.values()) or found.any_reads.overhead <= 0.05
    assert found.own_reads.step_us <= 1.05 * min(told.values()) or found.own_reads.overhead <= 0.05


def test_what_was_not_measured_is_not_advised() -> None:
    of = report()
    of.chain = [each for each in of.chain if each.rung in ("1", "2", "7")]
    assert chosen(advise(of, 20, 2.0, False)) == ("7", "7")
    of.chain = [each for each in of.chain if each.rung != "2"]
    with pytest.raises(UsageError, match="asynchronous"):
        advise(of, 20, 2.0, False)


@pytest.mark.parametrize(("count", "duration_us"), [(0, 5.0), (-1, 5.0), (20, 0.0), (20, -3.0), (20, float("nan"))])
def test_numbers_that_no_step_has(count: int, duration_us: float) -> None:
    with pytest.raises(UsageError, match="kernels of"):
        advise(report(), count, duration_us, False)


def test_without_a_gpu_there_is_no_advice() -> None:
    of = dataclasses.replace(report(), machine={"gpu": None})
    with pytest.raises(UsageError, match="without a GPU"):
        advise(of, 20, 5.0, False)


def test_fixed() -> None:
    assert fixed(report(), "3") == pytest.approx(COSTS["3"][0])
    assert fixed(report(), "12") == 0.0
    assert MANY > FEW


def test_lines_name_the_rungs() -> None:
    of = report()
    told = lines(of, advise(of, 1000, 2.0, False), 1000, 2.0, False)
    assert "1000 kernels of 2 us a step, fixed shapes, on A GPU" in told[0]
    assert any("advice: graph replay (rung 3)" in line for line in told)
    assert any("where each element depends on itself alone: fused (rung 4)" in line for line in told)
    of.chain = [each for each in of.chain if each.rung in ("2", "12")]
    long = lines(of, advise(of, 20, 2.0, False), 20, 2.0, False)
    assert "advice: task graph (rung 12)" in long[-2] and "takes 900 us beside them" in long[-1], long
    of = report()
    one = lines(of, advise(of, 1, 2.0, False), 1, 2.0, False)
    assert "resident kernel (rung 11) has them done 4 us" in one[-1]


def test_spread() -> None:
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    found = Spread.of(values)
    assert (found.median, found.p25, found.p75, found.low, found.high, found.count) == (3, 2, 4, 1, 5, 5)
    assert found.p99 == pytest.approx(4.96)
    half = found.scaled(0.5)
    assert (half.median, half.low, half.high, half.count) == (1.5, 0.5, 2.5, 5)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


def test_interpolate_over_logarithms() -> None:
    xs, ys = list(PURE_US.values()), [0.0, 1.0, 2.0, 3.0]
    assert [interpolate(x, xs, ys) for x in xs] == pytest.approx(ys)
    assert interpolate(10.0, xs, ys) == pytest.approx(1.5)  # half way from 5 to 20
    assert (interpolate(0.1, xs, ys), interpolate(1e6, xs, ys)) == (0.0, 3.0)
