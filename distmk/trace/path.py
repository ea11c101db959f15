"""The critical path of an iteration by operator: when its tasks start and end after the previous operator is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import LaunchKind
from distmk.program.reader import Ints
from distmk.trace.record import NEVER, UNKNOWN, Rows, Trace, layer_of
from distmk.trace.summary import families

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One operator, in microseconds; means over layers, iterations and ranks.

    Starts and ends count from the last end of the previous operator. If this rank has no task of that operator, the end
    on another rank counts. So `last_end` is the operator's share of the critical path.

    wait_to_start: median over its tasks of the time until the start, from the end of the last task waited for, on any
      rank, or from the end of the worker's previous task if that is later (nan: no task waited).
    body: from a task's start to its body's end.
    finish: from its body's end until its events are signaled.
    """

    op: str
    in_layers: bool
    times: float  # how often a rank runs it in an iteration
    num_tasks: float  # each time, on a rank
    wait_to_start: float
    body: float
    finish: float
    first_start: float
    median_start: float
    last_start: float
    first_end: float
    median_end: float
    last_end: float

    @property
    def spread_of_ends(self) -> float:
        """The time from the median end to the last end."""
        return self.last_end - self.median_end


def critical_path(trace: Trace) -> list[Step]:
    """The operators in program order; [] for an empty trace."""
    names, family = families(trace)
    layer: Ints = np.array([layer_of(op) for op in trace.ops] or [0], np.int64)[trace.rows["op"]]
    ran = (trace.rows["runner"] < trace.num_workers) | (trace.rows["launch"] == LaunchKind.SCHEDULER)
    if not ran.any():
        return []
    rows, family, layer = trace.rows[ran], family[ran], layer[ran]
    # A visit: the tasks of one operator in one layer, iteration and rank.
    keys = np.stack([rows["rank"], rows["iteration"], layer, family])
    by_key = np.lexsort(keys[::-1])
    keys = keys[:, by_key]
    begins = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-2), axis=0))
    visits = np.split(rows[by_key], begins[1:])
    keys = keys[:, begins]
    order = np.array([visit["order"].min() for visit in visits])
    costs, moments = np.array([_costs(each) for each in visits]), np.array([_moments(each) for each in visits])
    after, since = _predecessors(keys, order, moments[:, -1])
    moments = (moments[after] - moments[since, -1, None]) / 1000
    costs, order, layer, family = costs[after], order[after], keys[2, after], keys[3, after]
    steps = []
    for number in sorted(np.unique(family).tolist(), key=lambda n: float(order[family == n].mean())):
        mine, everywhere = family == number, keys[:, keys[3] == number]
        times = everywhere.shape[1] / len(np.unique(everywhere[:2], axis=1).T)
        means = [_mean(column) for column in np.hstack([costs[mine], moments[mine]]).T]
        steps.append(Step(names[number], bool((layer[mine] >= 0).all()), times, *means))
    return steps


def _predecessors(keys: Ints, order: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Every visit that has a predecessor on its rank's path, and that predecessor. `keys`: rank, iteration, layer, family.

    The path of a rank includes visits on other ranks for operators that only other ranks run.
    """
    ranks, foreign = _foreign_visits(keys, ends)
    own = np.arange(len(order) + len(foreign)) < len(order)
    rank, visit = np.concatenate([keys[0], ranks]), np.concatenate([np.arange(len(order)), foreign])
    in_order = np.lexsort((order[visit], keys[1, visit], rank))
    rank, own, visit = rank[in_order], own[in_order], visit[in_order]
    counted = (np.diff(rank) == 0) & own[1:]
    return visit[1:][counted], visit[:-1][counted]


def _foreign_visits(keys: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """For operators that only some ranks run, such as the scheduler step: each other rank, and the visit that it waits for.

    That visit is the last one to end.
    """
    visits_by_operator: dict[tuple[int, ...], dict[int, int]] = {}
    for visit, (rank, *rest) in enumerate(keys.T.tolist()):
        visits_by_operator.setdefault(tuple(rest), {})[rank] = visit
    ranks = sorted(set(keys[0].tolist()))
    pairs = [
        (rank, max(by_rank.values(), key=lambda visit: int(ends[visit])))
        for by_rank in visits_by_operator.values()
        for rank in ranks
        if rank not in by_rank
    ]
    visits = np.array(pairs, np.int64).reshape(-1, 2)
    return visits[:, 0], visits[:, 1]


def _costs(rows: Rows) -> list[float]:
    """Number of tasks; their median wait to start, mean body and mean finish, in microseconds."""
    known = (rows["ready_ns"] != UNKNOWN) & (rows["ready_ns"] != NEVER)
    hop = np.minimum(rows["start_ns"] - np.where(known, rows["ready_ns"], 0), rows["idle_ns"])
    body = rows["end_ns"] - rows["start_ns"] - rows["finish_ns"]
    wait = float(np.median(hop[known])) / 1000 if known.any() else float("nan")
    return [float(len(rows)), wait, float(body.mean()) / 1000, float(rows["finish_ns"].mean()) / 1000]


def _moments(rows: Rows) -> list[Any]:
    """First, median and last start, then first, median and last end, in nanoseconds."""
    return [f(rows[name]) for name in ("start_ns", "end_ns") for f in (np.min, np.median, np.max)]


def _mean(column: Floats) -> float:
    known = column[~np.isnan(column)]
    return float(known.mean()) if len(known) else float("nan")
