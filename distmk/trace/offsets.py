"""Clock offsets between ranks, estimated from the trace alone.

A task that waited for a signal started after the task that sent it. So for every event of rank b with producers on rank
a, start on b - start on a > 0 on one clock. The two clocks show that difference plus their offset. The least such
difference in each direction bounds the offset from both sides. Signals relayed by other ranks bound it as well
(shortest paths), so a ring of signals is enough.

Within those bounds the estimate works as in NTP (Mills, RFC 5905): half the difference between the least start on b -
end on a and the least start on a - end on b. Ends are nearer to the moment of the signal, but they prove nothing,
because a sender notes its end after it has signaled. The least 1 % of these differences is left out, because the sender
may have been interrupted in between. Tasks that may idle are left out, too, because they may start before their waits
are met.

All clocks are assumed to run at the same speed for the length of a trace. If they do not, the bounds may contradict
each other; then the error of the offset is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.program.reader import Ints
from distmk.tasks import TASK_TYPES
from distmk.trace.dependencies import Dependencies
from distmk.trace.ready import Times, grouped
from distmk.trace.record import UNKNOWN

Floats = npt.NDArray[np.float64]
INTERRUPTED = 0.01  # share of differences to leave out


class Offsets(NamedTuple):
    """For each rank, in ns: how far its clock is ahead of rank 0's, and the error of that offset (-1: offset unknown)."""

    ahead_ns: list[int]
    uncertainty_ns: list[int]


def clock_offsets(dependencies: Dependencies, times: Times) -> Offsets:
    """Offsets of all ranks to rank 0. A rank has offset 0 unless chains of signals connect it to rank 0 in both directions."""
    num_ranks = dependencies.tables.num_ranks
    if num_ranks == 1:
        return Offsets([0], [0])
    bounds = _relayed(_one_way(dependencies, times, times.last_start, 0.0))
    estimates = _relayed(_one_way(dependencies, times, times.last_end, INTERRUPTED))
    ahead, uncertainty = [0], [0]
    for rank in range(1, num_ranks):
        forth, back = bounds[0, rank], bounds[rank, 0]  # -back <= offset <= forth
        if not np.isfinite(forth + back):
            ahead.append(0)
            uncertainty.append(-1)
            continue
        offset, error = float(estimates[0, rank] - estimates[rank, 0]) / 2, -1
        if forth + back >= 0:
            offset = float(np.clip(offset, -back, forth))
            error = round(max(forth - offset, offset + back))
        ahead.append(round(offset))
        uncertainty.append(error)
    return Offsets(ahead, uncertainty)


def _one_way(dependencies: Dependencies, times: Times, sent: Ints, left_out: float) -> Floats:
    """float64 [from, to]: the least time from `sent` to the start of a waiting task, each on its rank's own clock.

    `left_out`: the share of the least times to ignore. Infinite if no event leads from one rank to the other.
    """
    tables = dependencies.tables
    num_ranks = tables.num_ranks
    least_ns: Floats = np.full((num_ranks, num_ranks), np.inf)
    first_start = _first_start_by_event(dependencies, times)
    target = tables.event_rank[dependencies.trigger_event]
    source = tables.tasks.rank[dependencies.trigger_task]
    remote = np.flatnonzero(source != target)
    if not len(remote):
        return least_ns
    key = dependencies.trigger_event[remote] * num_ranks + source[remote]
    by_key = np.argsort(key, kind="stable")
    begins, keys = grouped(key[by_key])
    last_sent = np.maximum.reduceat(sent[dependencies.trigger_task[remote[by_key]]], begins, axis=0)
    events, sources = np.divmod(keys, num_ranks)
    started = first_start[events]
    known = (last_sent != UNKNOWN) & (started != UNKNOWN)
    taken = np.where(known, started, 0) - np.where(known, last_sent, 0)
    targets = tables.event_rank[events]
    for a, b in {(int(a), int(b)) for a, b in zip(sources, targets, strict=True)}:
        mine = (sources == a) & (targets == b)
        values = taken[mine][known[mine]]
        if len(values):
            least_ns[a, b] = np.quantile(values, left_out, method="lower")
    return least_ns


def _first_start_by_event(dependencies: Dependencies, times: Times) -> Ints:
    """int64 [num_events, num_iterations]: the first start of a task that waited for the event's count of that iteration."""
    first_start: Ints = np.full((dependencies.tables.num_events, times.first_start.shape[1]), UNKNOWN)
    may_idle = [number for number, kind in TASK_TYPES.items() if kind.may_idle]
    waits: npt.NDArray[np.bool_] = ~np.isin(dependencies.tables.tasks.type[dependencies.wait_task], may_idle)
    for lag in np.unique(dependencies.wait_lag):
        mine = waits & (dependencies.wait_lag == lag)
        starts = times.first_start[dependencies.wait_task[mine], int(lag) :]
        np.minimum.at(first_start[:, : starts.shape[1]], dependencies.wait_event[mine], starts)
    return first_start


def _relayed(one_way: Floats) -> Floats:
    """The least time between ranks, also through other ranks (Floyd and Warshall)."""
    least: Floats = one_way.copy()
    np.fill_diagonal(least, 0)
    for rank in range(len(least)):
        least = np.minimum(least, least[:, rank, None] + least[None, rank, :])
        np.fill_diagonal(least, 0)
    return least
