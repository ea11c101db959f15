"""Which rung suits a step of `count` kernels of a given duration, predicted from the measurements on a GPU.

A step takes `fixed + count * (duration + added(duration))`. `fixed` is the rung's cost per step, `added` its cost per
kernel, interpolated between the measured durations. Two rules choose the rung:

1. If asynchronous launches add at most 5 % to the kernels' own time, they are the choice.
2. Otherwise the choice is the rung of least effort among those that fit the work and are within 5 % of the fastest.

If shapes vary, a graph is captured in every step, and a task graph, which is compiled for one shape, does not fit. Fused
and persistent kernels fit only if no element reads the result of another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmk.errors import UsageError
from lab.results import TITLES, LabReport
from lab.stats import interpolate
from lab.table import number

NEAR = 1.05  # times the fastest step; up to here the rung of less effort wins
BY_EFFORT = ("2", "3", "5", "4", "6", "7", "12")
OWN_ELEMENTS_ONLY = ("4", "6")
EVERY = ("1", "2", "3", "4", "5", "6", "7", "7f", "12")


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a step, and the kernels' own time in it, in us."""

    rung: str
    step_us: float
    kernels_us: float

    @property
    def overhead(self) -> float:
        """Time beside the kernels' own, as a fraction of it."""
        return self.step_us / self.kernels_us - 1


@dataclass(frozen=True)
class Advice:
    """The choice if kernels may read any element (`any_reads`), or only the element that they write (`own_reads`)."""

    predictions: list[Prediction]
    any_reads: Prediction
    own_reads: Prediction


def advise(report: LabReport, count: int, duration_us: float, varying: bool) -> Advice:
    """Predict every rung and choose one. UsageError: the report has no GPU measurements, or no step has these numbers."""
    if count < 1 or not 0 < duration_us < 1e9:
        raise UsageError(
            f"a step of {count} kernels of {duration_us:g} us; expected at least one, of a positive duration"
        )
    if not report.on_gpu:
        raise UsageError("this lab.json was written without a GPU; run distmk lab on the GPU in question first")
    found = [made for rung in EVERY if (made := predict(report, rung, count, duration_us, varying))]
    by_rung = {each.rung: each for each in found}
    if "2" not in by_rung:
        raise UsageError("this lab.json has no measurement of asynchronous launches; run distmk lab again")
    any_reads = [by_rung[rung] for rung in BY_EFFORT if rung in by_rung and rung not in OWN_ELEMENTS_ONLY]
    own_reads = [by_rung[rung] for rung in BY_EFFORT if rung in by_rung]
    return Advice(found, _choose(any_reads), _choose(own_reads))


def _choose(by_effort: list[Prediction]) -> Prediction:
    plain = by_effort[0]
    if plain.overhead <= NEAR - 1:
        return plain
    best = min(each.step_us for each in by_effort)
    return next(each for each in by_effort if each.step_us <= NEAR * best)


def predict(report: LabReport, rung: str, count: int, duration_us: float, varying: bool) -> Prediction | None:
    """Time of a step with `rung`; None if the rung was not measured or does not fit varying shapes."""
    num_kernels = int(report.settings["num_kernels"])
    points = [
        (pure, found)
        for size in report.sizes
        if (pure := report.pure_us(size)) and (found := report.at(rung, size, num_kernels))
    ]
    if not points or (varying and rung == "12"):
        return None
    points.sort(key=lambda point: point[0])
    fixed_us = fixed(report, rung)
    pures = [pure for pure, _ in points]
    added = [found.kernel_us.median - pure - fixed_us / num_kernels for pure, found in points]
    step_us = fixed_us + count * max(duration_us + interpolate(duration_us, pures, added), 0.0)
    if varying and rung == "3":
        step_us += interpolate(duration_us, pures, [found.prepare_us for _, found in points]) * count / num_kernels
    return Prediction(rung, step_us, count * duration_us)


def fixed(report: LabReport, rung: str) -> float:
    """Cost per step in us, independent of the number of kernels, from steps of two lengths.

    0 for rung 12, which runs all steps in one launch.
    """
    few, many = int(report.settings["num_kernels"]), int(report.settings["many_kernels"])
    for size in report.sizes:
        short, long = report.at(rung, size, few), report.at(rung, size, many)
        if short and long:
            per_kernel = (long.kernel_us.median * many - short.kernel_us.median * few) / (many - few)
            return max(few * (short.kernel_us.median - per_kernel), 0.0)
    return 0.0


def lines(report: LabReport, advice: Advice, count: int, duration_us: float, varying: bool) -> list[str]:
    """The advice as lines of text."""
    shapes = "varying" if varying else "fixed"
    told = [f"{count} kernels of {number(duration_us)} us a step, {shapes} shapes, on {report.machine['gpu']}"]
    for each in advice.predictions:
        told.append(
            f"  {each.rung:<3} {TITLES[each.rung]:<22} {number(each.step_us, 4):>8} us a step, "
            f"{100 * each.overhead:+.0f} % beside the kernels' own time"
        )
    told.append(f"advice: {_why(advice.any_reads, advice.predictions)}")
    if advice.any_reads.rung == "12":
        starts = [each.start_us for each in report.chain if each.rung == "12" and each.start_us is not None]
        start = f", which takes {number(max(starts))} us beside them" if starts else ""
        told.append(f"  its steps follow each other in one launch{start}; the host hears of the last one only")
    if advice.own_reads.rung != advice.any_reads.rung:
        told.append(f"where each element depends on itself alone: {_why(advice.own_reads, advice.predictions)}")
    if count == 1 and (resident := report.resident):
        fast, launched = (resident.ways[name] for name in ("resident", "kernel launch"))
        told.append(
            f"where kernels come one by one: a resident kernel (rung 11) has them done {number(fast.spread.median)} us "
            f"after they are submitted, a launch {number(launched.spread.median)} us; it draws {number(fast.watts)} W "
            f"meanwhile, launches {number(launched.watts)} W"
        )
    return told


def _why(chosen: Prediction, predictions: list[Prediction]) -> str:
    text = f"{TITLES[chosen.rung]} (rung {chosen.rung}), {number(chosen.step_us, 4)} us a step"
    naive = next((each for each in predictions if each.rung == "1"), None)
    if naive:
        text += f", {naive.step_us / chosen.step_us:.2f} times as fast as waiting for each kernel"
    if chosen.rung == "2" and chosen.overhead <= NEAR - 1:
        return f"{text}: launches cost {100 * max(chosen.overhead, 0):.1f} %, nothing else pays"
    return f"{text}: the least effort within 5 % of the fastest"
