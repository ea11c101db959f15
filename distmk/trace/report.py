"""A trace as tables of plain text."""

from __future__ import annotations

import numpy as np

from distmk.tasks import Nop
from distmk.trace.path import critical_path
from distmk.trace.record import Trace
from distmk.trace.summary import Spread, by_event, by_op, clock_step_ns, hops, idle_shares, iterations, messages
from distmk.trace.table import percent, table, us

MAX_EVENTS = 12
SPREAD = ("count", "total ms", "mean us", "p50 us", "p99 us")


def report(trace: Trace) -> str:
    """Time by operator, critical path, idle time by event, and hops, as plain text."""
    if not len(trace.on_workers()):
        return f"trace: no iteration was kept in full; {trace.num_dropped} records dropped\n"
    return "\n".join([_head(trace), _ops(trace), _path(trace), _events(trace), _hops(trace)])


def _cells(spread: Spread) -> list[str]:
    times = (spread.mean_us, spread.p50_us, spread.p99_us)
    return [str(spread.count), f"{spread.total_us / 1000:.2f}", *map(us, times)]


def _head(trace: Trace) -> str:
    numbers = np.unique(trace.on_workers()["iteration"])
    dropped = f"; {trace.num_dropped} records of earlier ones dropped" if trace.num_dropped else ""
    lines = [f"trace: {len(trace.rows)} records of iterations {numbers[0]} to {numbers[-1]}{dropped}"]
    if trace.num_ranks > 1:
        ahead = [each - trace.offsets_ns[0] for each in trace.offsets_ns]
        clocks = [
            f"rank {rank} {us(ahead[rank] / 1000)} us (to within {us(error / 1000)})"
            if error >= 0
            else f"rank {rank} unknown"
            for rank, error in enumerate(trace.uncertainty_ns)
            if rank
        ]
        lines.append(f"clocks ahead of rank 0's: {', '.join(clocks)}")
    lines.append(f"step of the clocks: {clock_step_ns(trace)} ns")
    each = iterations(trace)
    if each.count:
        lines.append(f"iteration: p50 {us(each.p50_us)} us, p99 {us(each.p99_us)} us over {each.count}")
    shares = ", ".join(f"rank {rank} {percent(share)}" for rank, share in enumerate(idle_shares(trace)))
    lines.append(f"workers idle: {shares}")
    if sent := messages(trace):
        by = ", ".join(f"{op} {count:g}" for op, count in sent.items())
        lines.append(f"messages between hosts, an iteration: {sum(sent.values()):g} ({by})")
    nops = [each.body_and_finish for each in by_op(trace) if each.type == Nop.type_name]
    if nops:
        count = sum(each.count for each in nops)
        lines.append(f"an empty task: mean {us(sum(each.total_us for each in nops) / count)} us over {count}")
    return "\n".join(lines) + "\n"


def _ops(trace: Trace) -> str:
    ops = by_op(trace)
    total = sum(each.body_and_finish.total_us for each in ops) or 1.0
    lines = [
        [each.op, each.type, *_cells(each.body_and_finish), percent(each.body_and_finish.total_us / total)]
        for each in ops
    ]
    return table("time on workers by operator", ("op", "type", *SPREAD, "share"), lines)


def _path(trace: Trace) -> str:
    head = ["op", "times", "tasks", "wait", "body", "finish", "start: first", "median", "last"]
    head += ["end: first", "median", "last", "spread"]
    steps = critical_path(trace)
    lines = []
    for step in steps:
        numbers = [step.wait_to_start, step.body, step.finish, step.first_start, step.median_start, step.last_start]
        numbers += [step.first_end, step.median_end, step.last_end, step.spread_of_ends]
        lines.append([step.op, f"{step.times:.0f}", f"{step.num_tasks:.0f}", *map(us, numbers)])
    text = table("critical path: us from the last end of the operator before, means of layers", head, lines)
    layers = sum(step.last_end for step in steps if step.in_layers)
    return text + (f"  a layer: {us(layers)} us\n" if layers else "")


def _events(trace: Trace) -> str:
    events = by_event(trace)
    total = sum(spread.total_us for _, spread in events) or 1.0
    lines = [[name, *_cells(spread), percent(spread.total_us / total)] for name, spread in events[:MAX_EVENTS]]
    return table("idle time of workers by the event that ended it", ("event", *SPREAD, "share"), lines)


def _hops(trace: Trace) -> str:
    lines = [[kind, *_cells(spread)] for kind, spread in hops(trace).items() if spread.count]
    return table("hops: end of the last task waited for to start, where a worker waited", ("kind", *SPREAD), lines)
