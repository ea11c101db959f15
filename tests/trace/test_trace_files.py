"""Files of traces: damaged ones, others in their place, and disks without room."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.full_disk import disk_for

from distmk import tasks, trace, user_files
from distmk.abi import LaunchKind
from distmk.errors import UsageError
from distmk.trace import Trace, chrome_reader
from distmk.trace.record import NEVER


@pytest.fixture(scope="module")
def found() -> Trace:
    """Two ranks of two workers and a scheduler; every other task waited for the other rank."""
    rows = np.zeros(24, trace.ROW)
    number = np.arange(24)
    rows["rank"], rows["runner"], rows["iteration"] = number // 12, number // 4 % 3, number % 4 // 2
    rows["op"] = rows["order"] = number % 2
    rows["type"], rows["launch"] = tasks.Nop.type_id, LaunchKind.AHEAD
    rows["start_ns"], rows["end_ns"] = 1000 * number, 1000 * number + 700
    rows["idle_ns"], rows["source"], rows["event"], rows["ready_ns"] = 300, -1, -1, NEVER
    waited = rows["op"] == 1
    rows["event"][waited], rows["source"][waited] = 0, 1 - rows["rank"][waited]
    rows["ready_ns"][waited] = rows["start_ns"][waited] - 100
    return Trace(rows, ["layers.0.a", "b"], ["a.done"], num_workers=2, offsets_ns=[0, 5], uncertainty_ns=[0, 3])


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_disk_without_room(name: str, found: Trace, tmp_path: Path) -> None:
    """The file stays as it was, or absent, and nothing else is left."""
    path = tmp_path / name
    for before in (None, b"an earlier trace"):
        if before is not None:
            path.write_bytes(before)
        with disk_for(512), pytest.raises(UsageError, match=f"cannot write the trace to {path}: File too large"):
            trace.write(found, path)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])
    with pytest.raises(UsageError, match="cannot write the trace to /dev/full: No space left"):
        trace.write(found, Path("/dev/full"))


def test_file_is_replaced_whole(found: Trace, tmp_path: Path) -> None:
    """Through a link, with the permissions that it had; and pipes are written to."""
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "old.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("old.json")
    trace.check_writable(tmp_path / "link.json")
    trace.write(found, tmp_path / "link.json")
    assert trace.report(trace.read(tmp_path / "old.json")) == trace.report(found)
    assert (tmp_path / "old.json").stat().st_mode & 0o777 == 0o640 and (tmp_path / "link.json").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2
    trace.write(found, Path("/dev/null"))
    os.mkfifo(tmp_path / "fifo")
    trace.check_writable(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo: No such device or address"):  # nobody reads
        trace.write(found, tmp_path / "fifo")
    reader, writer = os.pipe()
    with user_files.replacing(Path(f"/dev/fd/{writer}")) as file:
        file.write(b"abc")
    assert os.read(reader, 9) == b"abc"
    os.close(reader), os.close(writer)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file.json", tmp_path, Path("/proc/t.json"), Path("a\0b"), tmp_path / ("n" * 300)):
        with pytest.raises(UsageError, match="cannot write the trace"):
            trace.check_writable(path)


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.json"
    for text in ("", "{", "[]", '{"traceEvents": [{"ph": "X"}]}', "{}", "[" * 100_000, "9" * 5000, "\0"):
        bad.write_text(text)
        with pytest.raises(UsageError, match="no trace that distmk wrote"):
            trace.read(bad)
    bad.write_bytes(b"\xff")
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large.json").open("wb") as large:
        large.truncate(1 << 36)
    whole = gzip.compress(b'{"traceEvents": []}' + b" " * 5000)
    for name, data in {
        "text.gz": b"no gzip",
        "cut.gz": whole[:-9],
        "bits.gz": whole[:12] + b"\xff" * 9,
        "bomb.gz": whole,
    }.items():
        (tmp_path / name).write_bytes(data)
    for path, text in {
        "bad.json": "no trace that distmk wrote",
        "text.gz": "no trace that distmk wrote",
        "cut.gz": "no trace that distmk wrote",
        "bits.gz": "no trace that distmk wrote",
        "none.json": "No such file",
        "fifo": "is a FIFO; a regular file was expected",
        "large.json": "make one with generate --trace FILE",
        "/dev/zero": "is a device",
        ".": "is a folder",
    }.items():
        with pytest.raises(UsageError, match=text):
            trace.read(tmp_path / path)
    monkeypatch.setattr(chrome_reader, "MAX_BYTES", 1000)
    with pytest.raises(UsageError, match="no trace that distmk wrote"):
        trace.read(tmp_path / "bomb.gz")


VALUES: list[Any] = [
    None,
    -1,
    10**30,
    -(2**63),
    2**63 - 1,
    1e300,
    float("nan"),
    float("inf"),
    "text",
    "",
    [],
    {},
    True,
    7,
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value inside `value`."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def test_damaged_traces(found: Trace, tmp_path: Path, rng: np.random.Generator) -> None:
    """Of whatever value is wrong: one line, or a report."""
    trace.write(found, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    data["traceEvents"] = data["traceEvents"][:12]
    where = list(places(data))
    num_refused = 0
    for _ in range(600):
        damaged = copy.deepcopy(data)
        *above, key = where[rng.integers(len(where))]
        inner = damaged
        for each in above:
            inner = inner[each]
        inner[key] = VALUES[rng.integers(len(VALUES))]
        (tmp_path / "t.json").write_text(json.dumps(damaged))
        try:
            trace.report(trace.read(tmp_path / "t.json"))
        except UsageError:
            num_refused += 1
    assert 100 < num_refused < 600
