"""The way through an iteration, operator by operator: when its tasks start and end after the operator before is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import LaunchKind
from distmk.trace.record import NEVER, UNKNOWN, Ints, Rows, Trace, layer_of
from distmk.trace.summary import families

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One operator, in microseconds; means over layers, iterations and ranks.

    Starts and ends count from the last end of the operator before, on the same rank if it has that operator, so that
    `last_end` is what the operator adds to the way. `wait_to_start` is the median over its tasks from the end of the
    last task waited for, wherever that ran, or of the one before on the same worker, to the start (nan: nothing to
    wait for); `body` and `finish` are the parts of a task up to its body's end, and from there until its triggers are
    fired.
    """

    op: str
    in_layers: bool
    times: float  # in an iteration of a rank that has it
    num_tasks: float  # on a rank
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
        return self.last_end - self.median_end


def critical_path(trace: Trace) -> list[Step]:
    """The operators in program order."""
    names, family = families(trace)
    layer: Ints = np.array([layer_of(op) for op in trace.ops] or [0], np.int64)[trace.rows["op"]]
    ran = (trace.rows["runner"] < trace.num_workers) | (trace.rows["launch"] == LaunchKind.SCHEDULER)
    if not ran.any():
        return []
    rows, family, layer = trace.rows[ran], family[ran], layer[ran]
    # A passage: the tasks of one operator in one layer, iteration and rank.
    keys = np.stack([rows["rank"], rows["iteration"], layer, family])
    by_key = np.lexsort(keys[::-1])
    keys = keys[:, by_key]
    begins = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-2), axis=0))
    passages = np.split(rows[by_key], begins[1:])
    keys = keys[:, begins]
    order = np.array([passage["order"].min() for passage in passages])
    costs, moments = np.array([_costs(p) for p in passages]), np.array([_moments(p) for p in passages])
    guests, hosts = _elsewhere(keys, moments[:, -1])
    own = np.arange(len(order) + len(guests)) < len(order)
    rank = np.concatenate([keys[0], guests])
    here = np.concatenate([np.arange(len(order)), hosts])  # a guest's times are its host's
    in_turn = np.lexsort((order[here], keys[1, here], rank))
    rank, own, here = rank[in_turn], own[in_turn], here[in_turn]
    since = moments[here[:-1], -1, None]
    counted = (np.diff(rank) == 0) & own[1:]  # a rank's first passage has none before it
    moments = (moments[here[1:]] - since)[counted] / 1000
    here = here[1:][counted]
    costs, order, layer, family = costs[here], order[here], keys[2, here], keys[3, here]
    found = []
    for number in sorted(np.unique(family).tolist(), key=lambda n: float(order[family == n].mean())):
        mine, everywhere = family == number, keys[:, keys[3] == number]
        times = everywhere.shape[1] / len(np.unique(everywhere[:2], axis=1).T)
        means = [_mean(column) for column in np.hstack([costs[mine], moments[mine]]).T]
        found.append(Step(names[number], bool((layer[mine] >= 0).all()), times, *means))
    return found


def _elsewhere(keys: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Of operators that some ranks have and others have not, such as `prepare`: the others, and which passage each of
    them waits for instead, the last to end.
    """
    held: dict[tuple[int, ...], dict[int, int]] = {}
    for passage, (rank, *where) in enumerate(keys.T.tolist()):
        held.setdefault(tuple(where), {})[rank] = passage
    ranks = sorted(set(keys[0].tolist()))
    found = [
        (rank, max(by_rank.values(), key=lambda passage: int(ends[passage])))
        for by_rank in held.values()
        for rank in ranks
        if rank not in by_rank
    ]
    guests = np.array(found, np.int64).reshape(-1, 2)
    return guests[:, 0], guests[:, 1]


def _costs(rows: Rows) -> list[float]:
    """Number of tasks; and of them the median wait to start, and mean body and finish, in microseconds."""
    known = (rows["ready_ns"] != UNKNOWN) & (rows["ready_ns"] != NEVER)
    hop = np.minimum(rows["start_ns"] - np.where(known, rows["ready_ns"], 0), rows["idle_ns"])
    body = rows["end_ns"] - rows["start_ns"] - rows["finish_ns"]
    wait = float(np.median(hop[known])) / 1000 if known.any() else float("nan")
    return [float(len(rows)), wait, float(body.mean()) / 1000, float(rows["finish_ns"].mean()) / 1000]


def _moments(rows: Rows) -> list[Any]:
    """First, median and last start, first, median and last end, in nanoseconds."""
    return [f(rows[name]) for name in ("start_ns", "end_ns") for f in (np.min, np.median, np.max)]


def _mean(column: Floats) -> float:
    known = column[~np.isnan(column)]
    return float(known.mean()) if len(known) else float("nan")
