"""How far the clocks of ranks lie apart, from nothing but the trace.

A task that waited for a signal started after the task that sent it. So, for every event of rank b with producers on
rank a, start on b - start on a > 0 on one clock; what the two clocks show is that plus their offset. The least such
difference each way bounds the offset from both sides. Signals relayed by other ranks bound it as well (shortest paths),
so that a ring is enough. Within those bounds the offset is half the difference of the least start on b - end on a and
the least start on a - end on b, as in NTP (Mills, RFC 5905): ends are nearer to the moment of the signal, but prove
nothing, as a signal goes out before its sender notes its end. One in a hundred of them is left out as a sender that was
interrupted just then.

Clocks are taken to run at the same speed for as long as a trace lasts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distmk.trace.ready import Times, grouped
from distmk.trace.record import UNKNOWN, Ints
from distmk.trace.wiring import Wiring

Floats = npt.NDArray[np.float64]
INTERRUPTED = 0.01  # share of differences to leave out


class Offsets(NamedTuple):
    """Nanoseconds by rank that its clock is ahead of rank 0's, and how far that may be off (-1: not known at all)."""

    ahead_ns: list[int]
    uncertainty_ns: list[int]


def clock_offsets(wiring: Wiring, times: Times, num_ranks: int) -> Offsets:
    """Offsets of all ranks to rank 0; 0 for a rank from or to which no signal came."""
    if num_ranks == 1:
        return Offsets([0], [0])
    bounds, estimates = (_one_way(wiring, times, num_ranks, table) for table in (times.last_start, times.last_end))
    bounds, estimates = _relayed(bounds), _relayed(estimates)
    ahead, uncertainty = [0], [0]
    for rank in range(1, num_ranks):
        there, back = bounds[0, rank], bounds[rank, 0]  # -back <= offset <= there
        if not np.isfinite(there + back):
            ahead.append(0)
            uncertainty.append(-1)
            continue
        offset = float(np.clip((estimates[0, rank] - estimates[rank, 0]) / 2, -back, there))
        ahead.append(round(offset))
        uncertainty.append(max(0, round(max(there - offset, offset + back))))
    return Offsets(ahead, uncertainty)


def _one_way(wiring: Wiring, times: Times, num_ranks: int, sent: Ints) -> Floats:
    """[from, to]: the least time by the two clocks from `sent` to the start of a task that waited; infinite without."""
    found: Floats = np.full((num_ranks, num_ranks), np.inf)
    first_heard = _first_heard(wiring, times)
    to = wiring.event_rank[wiring.trigger_event]
    source = wiring.task_rank[wiring.trigger_task]
    pairs = np.flatnonzero(source != to)
    if not len(pairs):
        return found
    key = wiring.trigger_event[pairs] * num_ranks + source[pairs]
    by_key = np.argsort(key, kind="stable")
    begins, keys = grouped(key[by_key])
    last_sent = np.maximum.reduceat(sent[wiring.trigger_task[pairs[by_key]]], begins, axis=0)
    events, sources = np.divmod(keys, num_ranks)
    heard = first_heard[events]
    known = (last_sent != UNKNOWN) & (heard != UNKNOWN)
    waited = np.where(known, heard, 0) - np.where(known, last_sent, 0)
    tos = wiring.event_rank[events]
    share = INTERRUPTED if sent is times.last_end else 0.0
    for a, b in {(int(a), int(b)) for a, b in zip(sources, tos, strict=True)}:
        mine = (sources == a) & (tos == b)
        values = waited[mine][known[mine]]
        if len(values):
            found[a, b] = np.quantile(values, share, method="lower")
    return found


def _first_heard(wiring: Wiring, times: Times) -> Ints:
    """[num_events, num_iterations]: the first start of a task that waited for an iteration's count of an event."""
    heard: Ints = np.full((wiring.num_events, times.first_start.shape[1]), UNKNOWN)
    for lag in np.unique(wiring.wait_lag):
        mine = wiring.wait_lag == lag
        starts = times.first_start[wiring.wait_task[mine], int(lag) :]
        np.minimum.at(heard[:, : starts.shape[1]], wiring.wait_event[mine], starts)
    return heard


def _relayed(one_way: Floats) -> Floats:
    """The least way from rank to rank over any others (Floyd and Warshall)."""
    least: Floats = one_way.copy()
    np.fill_diagonal(least, 0)
    for rank in range(len(least)):
        least = np.minimum(least, least[:, rank, None] + least[None, rank, :])
        np.fill_diagonal(least, 0)
    return least
