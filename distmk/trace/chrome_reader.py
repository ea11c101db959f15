"""Reads traces back from files that `chrome.write` has written. A file may be damaged, or something else."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distmk.abi import MAX_RANKS, LaunchKind
from distmk.errors import UsageError
from distmk.tasks import TASK_TYPES
from distmk.tasks.own_types import find_types
from distmk.trace.chrome import COPIED
from distmk.trace.record import NEVER, ROW, UNKNOWN, Trace
from distmk.user_files import read_whole

MAX_BYTES = 1 << 30  # limit for a file, also after decompression
_MOST = 1 << 40  # for a number that counts something
_MOST_RUNNERS = 1 << 20  # for a rank
_MOST_US = 1e12  # for a time; eleven days


def read(path: Path) -> Trace:
    """Read a file of `chrome.write`. UsageError: it is another file, or it has tasks of types that are not registered."""
    data = read_whole(path, MAX_BYTES, UsageError, "make one with generate --trace FILE")
    try:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError
        return _trace(json.loads(data), path)
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ):
        raise UsageError(f"{path} is no trace that distmk wrote; make one with generate --trace FILE") from None


def _trace(data: Any, path: Path) -> Trace:
    """The trace in a file's JSON value. Many kinds of exceptions are possible if it is no trace."""
    ops: dict[str, int] = {}
    events: dict[str, int] = {}
    slices = [event for event in data["traceEvents"] if event["ph"] == "X" and event["cat"] != "wait"]
    meta = data["otherData"]
    offsets_ns = _wholes(meta["offsets_ns"], -(1 << 63), (1 << 63) - 1)
    num_ranks = len(offsets_ns)
    uncertainty_ns = _wholes(meta["uncertainty_ns"], -1, (1 << 63) - 1)
    if not 1 <= num_ranks <= MAX_RANKS or len(uncertainty_ns) != num_ranks:
        raise ValueError
    types = {cls.type_name: type_id for type_id, cls in TASK_TYPES.items()}
    missing = {event["args"]["type"] for event in slices} - types.keys()
    types |= {cls.type_name: cls.type_id for cls in find_types(sorted(missing), f"the trace {path}")}
    rows = np.zeros(len(slices), ROW)
    for row, event in zip(rows, slices, strict=True):
        args = event["args"]
        for name in COPIED:
            row[name] = _whole(args[name], -1, _MOST)
        row["rank"], row["runner"] = _whole(event["pid"], 0, num_ranks - 1), _whole(event["tid"], 0, _MOST_RUNNERS)
        row["op"] = ops.setdefault(_text(args["op"]), len(ops))
        row["type"], row["launch"] = types[args["type"]], LaunchKind[args["launch"].upper()]
        row["start_ns"], row["end_ns"] = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
        row["finish_ns"], row["idle_ns"] = _ns(args["finish_us"]), _ns(args["idle_us"])
        row["source"], row["event"] = _whole(args.get("source", -1), -1, num_ranks - 1), -1
        row["messages"] = _whole(args.get("messages", 0), 0, _MOST)
        if "event" in args:
            row["event"] = events.setdefault(_text(args["event"]), len(events))
        if "ready_us" in args:
            row["ready_ns"] = _ns(args["ready_us"])
        else:
            row["ready_ns"] = UNKNOWN if args["ready"] == "unknown" else NEVER
    return Trace(
        rows,
        list(ops),
        list(events),
        num_workers=_whole(meta["num_workers"], 1, _MOST_RUNNERS),
        offsets_ns=offsets_ns,
        uncertainty_ns=uncertainty_ns,
        num_dropped=_whole(meta["num_dropped"], 0, _MOST),
    )


def _whole(value: Any, least: int, most: int) -> int:
    """Returns `value`. ValueError: it is not a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError
    return value


def _wholes(values: Any, least: int, most: int) -> list[int]:
    if not isinstance(values, Sequence):
        raise ValueError
    return [_whole(value, least, most) for value in values]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _ns(us: Any) -> int:
    """Nanoseconds from microseconds. ValueError: `us` is not a time."""
    if not isinstance(us, int | float) or not abs(us) <= _MOST_US:
        raise ValueError
    return round(us * 1000)
