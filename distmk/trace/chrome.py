"""A trace as a file for Perfetto (ui.perfetto.dev) or chrome://tracing; `chrome_reader` reads it back.

The format is Chrome's trace event format: a process is a rank, a thread is a worker or scheduler, and times are
microseconds since the first start, with three decimals. Slices of category "wait" show the event that an idle worker
waited for. A file whose name ends in .gz is compressed; both viewers read it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from distmk.abi import LaunchKind
from distmk.errors import UsageError
from distmk.tasks import TASK_TYPES
from distmk.trace.record import NEVER, ROW, UNKNOWN, Trace
from distmk.user_files import check_replaceable, replacing

COPIED = ("iteration", "instance", "order")  # columns that the file has unchanged
CHUNK_ROWS = 4096  # rows converted to Python objects at a time


def check_writable(path: Path) -> None:
    """UsageError unless a trace can be written to `path`; creates no file."""
    try:
        check_replaceable(path)
    except OSError as error:
        raise UsageError(_unwritable(path, error)) from None


def _unwritable(path: Path, error: OSError) -> str:
    return f"cannot write the trace to {path}: {error.strerror}; give --trace a file in a folder that can be written"


def write(trace: Trace, path: Path) -> None:
    """Write `trace` to `path`. If that fails, the file keeps its old contents. UsageError: it cannot be written."""
    meta = {"num_workers": trace.num_workers, "num_dropped": trace.num_dropped}
    clocks = {"offsets_ns": trace.offsets_ns, "uncertainty_ns": trace.uncertainty_ns}
    head = f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(meta | clocks)}, "traceEvents": [\n'
    try:
        with replacing(path) as file, _compressed(file, path) as out:
            out.write(head.encode())
            for number, event in enumerate(_events(trace)):
                out.write(((",\n" if number else "") + json.dumps(event, separators=(",", ":"))).encode())
            out.write(b"\n]}\n")
    except OSError as error:
        raise UsageError(_unwritable(path, error)) from None


def _compressed(file: BinaryIO, path: Path) -> AbstractContextManager[BinaryIO]:
    """`file` or, if `path` ends in .gz, a stream that compresses into it."""
    if path.suffix != ".gz":
        return nullcontext(file)
    return cast(AbstractContextManager[BinaryIO], gzip.GzipFile("", "wb", compresslevel=1, fileobj=file))


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
    """Slices of a row: the wait before the task, if its worker `waited`, then the task."""
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
