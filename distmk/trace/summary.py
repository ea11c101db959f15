"""Where the time of a trace went: by operator, by event, by hop, by iteration. All times in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.abi import LISTED
from distmk.program.reader import Ints
from distmk.tasks import TASK_TYPES, SchedulerStep
from distmk.trace.record import UNKNOWN, Rows, Trace, family_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Statistics of some durations, in microseconds; all 0 if there are no durations."""

    count: int
    total_us: float
    mean_us: float
    p50_us: float
    p99_us: float

    @staticmethod
    def of(durations_ns: Ints) -> Spread:
        if not len(durations_ns):
            return Spread(0, 0.0, 0.0, 0.0, 0.0)
        p50, p99 = np.percentile(durations_ns, [50, 99]) / 1000
        return Spread(
            len(durations_ns), durations_ns.sum() / 1000, float(durations_ns.mean()) / 1000, float(p50), float(p99)
        )


class ByOp(NamedTuple):
    """Tasks of one operator and type, over all layers."""

    op: str
    type: str
    body_and_finish: Spread
    finish_us: float  # mean


def families(trace: Trace) -> tuple[list[str], Ints]:
    """Operator names without layer numbers, and for each row its index into them."""
    names = [family_of(op) for op in trace.ops]
    distinct = list(dict.fromkeys(names))
    index = np.array([distinct.index(name) for name in names] or [0], np.int64)
    return distinct, index[trace.rows["op"]]


def by_op(trace: Trace) -> list[ByOp]:
    """Time of tasks on workers, from start to end, by operator and type, with the largest total first."""
    names, family = families(trace)
    ran = trace.rows["runner"] < trace.num_workers
    ops = []
    for number, name in enumerate(names):
        of_op = ran & (family == number)
        for type_id in np.unique(trace.rows["type"][of_op]).tolist():
            rows = trace.rows[of_op & (trace.rows["type"] == type_id)]
            spread = Spread.of(rows["end_ns"] - rows["start_ns"])
            ops.append(ByOp(name, TASK_TYPES[type_id].type_name, spread, float(rows["finish_ns"].mean()) / 1000))
    return sorted(ops, key=lambda each: -each.body_and_finish.total_us)


def by_event(trace: Trace) -> list[tuple[str, Spread]]:
    """Idle time of workers by the event that ended it, over all layers, with the largest total first."""
    rows = trace.rows[trace.waited()]
    names = [family_of(name) for name in trace.events]
    distinct = list(dict.fromkeys(names))
    index = np.array([distinct.index(name) for name in names] or [0], np.int64)[rows["event"]]
    events = [(name, Spread.of(rows["idle_ns"][index == number])) for number, name in enumerate(distinct)]
    return sorted((each for each in events if each[1].count), key=lambda each: -each[1].total_us)


def hops(trace: Trace) -> dict[str, Spread]:
    """For each kind of hop: the time from the end of the last task waited for to the waiting task's start on an idle worker."""
    rows = trace.rows[trace.waited()]
    latency = rows["start_ns"] - rows["ready_ns"]
    ahead = np.isin(rows["launch"], LISTED)
    own = rows["source"] == rows["rank"]
    return {
        "same rank": Spread.of(latency[ahead & own]),
        "cross rank": Spread.of(latency[ahead & ~own]),
        "just in time": Spread.of(latency[~ahead]),
    }


def idle_shares(trace: Trace) -> list[float]:
    """For each rank: the share of its workers' time, from the first start to the last end, in which no task ran.

    Tasks of a worker may overlap: on a GPU the next task may start while the previous task's events are still being
    signaled.
    """
    rows = trace.on_workers()
    if not len(rows):
        return [0.0] * trace.num_ranks
    worker = rows["rank"] * trace.num_workers + rows["runner"]
    in_order = np.lexsort((rows["start_ns"], worker))
    rows, worker = rows[in_order], worker[in_order]
    first, last = int(rows["start_ns"].min()), int(rows["end_ns"].max())
    span, own = (last - first) * trace.num_workers, worker * (last - first + 1)  # each worker gets its own time axis
    begins, ends = rows["start_ns"] - first + own, rows["end_ns"] - first + own
    reached = np.concatenate([begins[:1], np.maximum.accumulate(ends)[:-1]])
    busy = np.bincount(rows["rank"], np.maximum(ends - np.maximum(begins, reached), 0), trace.num_ranks)
    return [float(1 - each / span) if span else 0.0 for each in busy]


def iterations(trace: Trace) -> Spread:
    """Time between the starts of iterations. An iteration starts with its scheduler step, or else with its first task."""
    rows: Rows = trace.rows
    steps = rows[rows["type"] == SchedulerStep.type_id]
    starts = steps if len(steps) else trace.on_workers()
    numbers, index = np.unique(starts["iteration"], return_inverse=True)
    first: Ints = np.full(len(numbers), UNKNOWN)
    np.minimum.at(first, index, starts["start_ns"])
    return Spread.of(np.diff(first))


def messages(trace: Trace) -> dict[str, float]:
    """Messages between hosts in an iteration, by operator, over all layers; operators without messages are left out."""
    names, family = families(trace)
    counts = {}
    for number in np.unique(family[trace.rows["messages"] > 0]).tolist():
        rows = trace.rows[family == number]
        counts[names[number]] = float(rows["messages"].sum() / len(np.unique(rows["iteration"])))
    return counts


def clock_step_ns(trace: Trace) -> int:
    """Resolution of the clocks: the greatest common divisor of the times between starts on a rank."""
    starts = (np.unique(trace.rows["start_ns"][trace.rows["rank"] == rank]) for rank in range(trace.num_ranks))
    return int(np.gcd.reduce([int(np.gcd.reduce(np.diff(each))) for each in starts if len(each) > 1] or [0]))
