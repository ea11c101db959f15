"""A trace as a file for Perfetto (ui.perfetto.dev) or chrome://tracing, and back.

The format is Chrome's trace event format: a process is a rank, a thread is a worker or scheduler, times are microseconds
since the first start with three decimals. Slices of category "wait" show the event that an idle worker waited for. A file
whose name ends in .gz is compressed; both viewers read that.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from distmk.abi import LaunchKind
from distmk.errors import UsageError
from distmk.tasks import TASK_TYPES
from distmk.trace.record import NEVER, ROW, UNKNOWN, Trace

COPIED = ("iteration", "instance", "order")  # columns whose values the file has unchanged
CHUNK_ROWS = 4096  # rows converted to Python objects at a time


def check_writable(path: Path) -> None:
    """UsageError unless a trace can be written to `path`; creates no file."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(_unwritable(path, error)) from None


def _unwritable(path: Path, error: OSError) -> str:
    return f"cannot write the trace to {path}: {error.strerror}; give --trace a file in a folder that can be written"


def _open(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=1)
    return path.open(mode)


def write(trace: Trace, path: Path) -> None:
    """Write `trace` to `path`; UsageError if that cannot be written."""
    meta = {"num_workers": trace.num_workers, "num_dropped": trace.num_dropped}
    clocks = {"offsets_ns": trace.offsets_ns, "uncertainty_ns": trace.uncertainty_ns}
    try:
        with _open(path, "wt") as file:
            file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(meta | clocks)}, "traceEvents": [\n')
            for number, event in enumerate(_events(trace)):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise UsageError(_unwritable(path, error)) from None


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank, runner in np.unique(trace.rows[["rank", "runner"]]).tolist():
        scheduler = runner - trace.num_workers
        name = f"worker {runner}" if scheduler < 0 else f"scheduler {scheduler}"
        if runner == 0:
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": runner, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": runner, "args": {"sort_index": runner}}
    waited = trace.waited()
    for begin in range(0, len(trace.rows), CHUNK_ROWS):
        part = slice(begin, begin + CHUNK_ROWS)
        for row, has_waited in zip(trace.rows[part].tolist(), waited[part].tolist(), strict=True):
            yield from _slices(trace, dict(zip(ROW.names or (), row, strict=True)), has_waited)


def _slices(trace: Trace, row: dict[str, int], waited: bool) -> Iterator[dict[str, Any]]:
    """Slices of a row: the wait before the task if its worker `waited`, then the task."""
    op, on_worker = trace.ops[row["op"]], row["runner"] < trace.num_workers
    args: dict[str, Any] = {name: row[name] for name in COPIED} | {
        "type": TASK_TYPES[row["type"]].type_name,
        "launch": LaunchKind(row["launch"]).name.lower(),
        "op": op,
        "finish_us": row["finish_ns"] / 1000,
        "idle_us": row["idle_ns"] / 1000,
    }
    if row["messages"]:
        args["messages"] = row["messages"]
    if row["event"] >= 0:
        args |= {"event": trace.events[row["event"]], "source": row["source"]}
    if row["ready_ns"] not in (UNKNOWN, NEVER):
        args["ready_us"] = row["ready_ns"] / 1000
    else:
        args["ready"] = "unknown" if row["ready_ns"] == UNKNOWN else "always"
    base = {"ph": "X", "pid": row["rank"], "tid": row["runner"]}
    if waited:
        times = {"ts": (row["start_ns"] - row["idle_ns"]) / 1000, "dur": row["idle_ns"] / 1000}
        yield base | times | {"name": args["event"], "cat": "wait", "args": {"for": op}}
    times = {"ts": row["start_ns"] / 1000, "dur": (row["end_ns"] - row["start_ns"]) / 1000}
    yield base | times | {"name": op, "cat": "task" if on_worker else "schedule", "args": args}


def read(path: Path) -> Trace:
    """Read a file of `write`; UsageError for anything else."""
    try:
        with _open(path, "rt") as file:
            data = json.load(file)
        return _trace(data)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError):
        raise UsageError(f"{path} is no trace that distmk wrote; make one with generate --trace FILE") from None


def _trace(data: Any) -> Trace:
    types = {cls.type_name: type_id for type_id, cls in TASK_TYPES.items()}
    ops: dict[str, int] = {}
    events: dict[str, int] = {}
    slices = [event for event in data["traceEvents"] if event["ph"] == "X" and event["cat"] != "wait"]
    rows = np.zeros(len(slices), ROW)
    for row, event in zip(rows, slices, strict=True):
        args = event["args"]
        for name in COPIED:
            row[name] = args[name]
        row["rank"], row["runner"] = event["pid"], event["tid"]
        row["op"] = ops.setdefault(args["op"], len(ops))
        row["type"], row["launch"] = types[args["type"]], LaunchKind[args["launch"].upper()]
        row["start_ns"], row["end_ns"] = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
        row["finish_ns"], row["idle_ns"] = _ns(args["finish_us"]), _ns(args["idle_us"])
        row["source"], row["event"] = args.get("source", -1), -1
        row["messages"] = args.get("messages", 0)
        if "event" in args:
            row["event"] = events.setdefault(args["event"], len(events))
        if "ready_us" in args:
            row["ready_ns"] = _ns(args["ready_us"])
        else:
            row["ready_ns"] = UNKNOWN if args["ready"] == "unknown" else NEVER
    return Trace(rows, list(ops), list(events), **data["otherData"])


def _ns(us: float) -> int:
    return round(us * 1000)
