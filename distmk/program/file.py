"""A program as a file: a rank reads its own part in a moment, and the others' parts only if they are asked for.

A numpy archive (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) with an entry for what all ranks
share and three for each rank: the program's bytes, its names, and its weights. The archive's checksums find damage; a rank's
bytes must also be those that the program's fingerprint was made from.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from distmk.abi import ProgramHeader, Queue, Space, TaskDesc, Trigger, Wait
from distmk.graph.regions import Buffer, Segment, Tiling, Weight, WeightKind
from distmk.program.layout import Placed, Placement
from distmk.program.program import Program, RankProgram, join_digests

SHARED_FIELDS = (
    "events_heap_offset",
    "rings_heap_offset",
    "jit_capacity",
    "zeroed_heap_bytes",
    "heap_bytes",
    "local_bytes",
)


class DamagedFile(Exception):
    """A file that does not hold a program, or not all of it."""


@dataclass
class SavedProgram(Program):
    """A program read back. `placement` has all buffers, and the weights of the rank it was read for."""

    digests: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        return join_digests(self.digests)


def save(program: Program, path: Path) -> None:
    """Write `program` to `path`; weights given as arrays cannot be saved (ValueError)."""
    placement = program.placement
    shared = {name: getattr(placement, name) for name in SHARED_FIELDS}
    shared["digests"] = [part.digest() for part in program.ranks]
    shared["buffers"] = [
        [b.index, b.name, b.rows, b.cols, b.dtype, int(b.space), b.lamport, placed.offset]
        for b, placed in placement.buffers.items()
    ]
    entries = {"shared": _text(shared)}
    for rank, part in enumerate(program.ranks):
        weights = [_described(w, placed) for w, placed in placement.weights.items() if w.rank == rank]
        entries[f"program{rank}"] = np.frombuffer(part.to_bytes(), np.uint8)
        entries[f"names{rank}"] = _text([_numbered(part.task_names), _numbered(part.event_names), part.weight_bytes])
        entries[f"weights{rank}"] = _text(weights)
    with path.open("wb") as file:
        np.savez(file, **entries)  # type: ignore[arg-type]  # numpy's stub takes the names for those of its options


def load(path: Path, rank: int) -> SavedProgram:
    """The program at `path`, for `rank`. DamagedFile: it cannot be read, or is not what was saved."""
    with _reading(path):
        archive = np.load(path)  # stays open, so that the file may be replaced or removed
        shared = _value(archive["shared"])
        buffers = {}
        for index, name, rows, cols, dtype, space, lamport, offset in shared["buffers"]:
            buffer = Buffer(index, name, rows, cols, dtype, Space(space), lamport)
            buffers[buffer] = Placed(name, buffer.space, -1, offset, rows, buffer.row_bytes)
        weights = dict(_weight(rank, entry) for entry in _value(archive[f"weights{rank}"]))
        fields = {name: shared[name] for name in SHARED_FIELDS} | {"local_bytes": tuple(shared["local_bytes"])}
        placement = Placement((*buffers.values(), *weights.values()), buffers, weights, **fields)
        ranks = _Ranks(path, archive, tuple(shared["digests"]))
    ranks[rank]  # now, while it is easily replaced
    return SavedProgram(ranks, placement, ranks.digests)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many kinds, depending on which byte is wrong
        raise DamagedFile(f"{path}: {type(error).__name__}: {error}") from None


class _Ranks(Sequence[RankProgram]):
    """Every rank's part, each read when first asked for."""

    def __init__(self, path: Path, archive: Any, digests: tuple[str, ...]) -> None:
        self.digests = digests
        self._path, self._archive = path, archive
        self._read: dict[int, RankProgram] = {}

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> RankProgram: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankProgram]: ...
    def __getitem__(self, index: int | slice) -> RankProgram | list[RankProgram]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        if rank not in self._read:
            with _reading(self._path):
                self._read[rank] = _rank_program(self._archive, rank, self.digests[rank])
        return self._read[rank]


def _rank_program(archive: Any, rank: int, digest: str) -> RankProgram:
    raw = archive[f"program{rank}"]
    tasks, events, weight_bytes = _value(archive[f"names{rank}"])
    header = ProgramHeader.from_buffer(raw)

    def section(kind: Any, count: int, offset: int) -> Any:
        return (kind * count).from_buffer(raw, offset)

    part = RankProgram(
        header=header,
        tasks=section(TaskDesc, header.num_tasks, header.tasks_offset),
        waits=section(Wait, header.num_waits, header.waits_offset),
        triggers=section(Trigger, header.num_triggers, header.triggers_offset),
        queues=section(Queue, header.num_workers, header.queues_offset),
        launches=section(ctypes.c_uint32, header.num_launches, header.launches_offset),
        task_names=_names(tasks),
        event_names=_names(events),
        weight_bytes=weight_bytes,
    )
    if part.digest() != digest:
        raise ValueError(f"rank {rank} is not the one that was saved")
    return part


def _text(value: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def _value(text: npt.NDArray[np.uint8]) -> Any:
    return json.loads(text.tobytes())


def _numbered(names: Sequence[str]) -> list[Any]:
    """Few names are used many times: each once, then which of them each is."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [list(numbers), [numbers[name] for name in names]]


def _names(numbered: list[Any]) -> list[str]:
    distinct, numbers = numbered
    return [distinct[number] for number in numbers]


def _described(weight: Weight, placed: Placed) -> list[Any]:
    if weight.data is not None:
        raise ValueError(f"weight {weight.name} was given as an array; only programs without such can be saved")
    tiling = weight.tiling and [weight.tiling.slabs, weight.tiling.paired]
    segments = [[s.tensor, s.row_begin, s.row_end] for s in weight.segments]
    return [
        weight.name, weight.rows, weight.cols, weight.kind.value, weight.col_begin, segments, tiling, weight.col_scale,
        placed.offset
    ]  # fmt: skip


def _weight(rank: int, entry: list[Any]) -> tuple[Weight, Placed]:
    name, rows, cols, kind, col_begin, segments, tiling, col_scale, offset = entry
    weight = Weight(
        name,
        rank,
        rows,
        cols,
        WeightKind(kind),
        tuple(Segment(*segment) for segment in segments),
        col_begin,
        tiling=tiling and Tiling(tuple((begin, end) for begin, end in tiling[0]), tiling[1]),
        col_scale=col_scale,
    )
    return weight, Placed(name, Space.LOCAL, rank, offset, rows, weight.row_bytes, read_only=True)
