"""A program as a file. A rank reads its own part, and other ranks' parts only on demand.

The file is a numpy archive (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). For each program
of the launch it has one entry that all ranks share, and three for each rank: the program's bytes, its names, and its
weights. The archive's checksums find damage. In addition, a rank's bytes must have the digest that is part of the
program's fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from distmk.abi import ProgramHeader, Space
from distmk.errors import DistmkError, UsageError
from distmk.formats import FORMATS
from distmk.graph.regions import Buffer, Segment, Tiling, Weight, WeightKind
from distmk.program.layout import HEADER_FIELDS, Placed, Placement
from distmk.program.program import SECTIONS, Program, RankProgram, join_digests
from distmk.tasks.abi_header import abi_hash
from distmk.tasks.own_types import find_types

LAYOUT_FIELDS = (*HEADER_FIELDS, "local_bytes")


class DamagedFile(DistmkError):
    """A file that contains no program, or only part of one."""


@dataclass
class SavedProgram(Program):
    """A program from a file. `placement` has all buffers, but only the weights of the rank that read it."""

    digests: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        saved = [each for each in self.every if isinstance(each, SavedProgram)]
        return join_digests([digest for each in saved for digest in each.digests])


def save(program: Program, path: Path) -> None:
    """Write `program` to `path`. ValueError: a weight was given as an array, which cannot be saved."""
    entries: dict[str, npt.NDArray[np.uint8]] = {}
    for index, each in enumerate(program.every):
        entries |= {f"{index}.{name}": entry for name, entry in _entries(each).items()}
    with path.open("wb") as file:
        np.savez(file, **entries)  # type: ignore[arg-type]  # numpy's stub takes the names for options


def _entries(program: Program) -> dict[str, npt.NDArray[np.uint8]]:
    placement = program.placement
    shared = {name: getattr(placement, name) for name in LAYOUT_FIELDS}
    shared["digests"] = [part.digest() for part in program.ranks]
    shared["buffers"] = [
        [b.name, b.rows, b.cols, b.dtype, int(b.space), b.lamport, allocation.offset]
        for b, allocation in placement.buffers.items()
    ]
    entries = {"shared": _text(shared)}
    for rank, part in enumerate(program.ranks):
        weights = [_encoded(w, allocation) for w, allocation in placement.weights.items() if w.rank == rank]
        entries[f"program{rank}"] = np.frombuffer(part.to_bytes(), np.uint8)
        entries[f"names{rank}"] = _text(
            [_indexed(part.task_names), _indexed(part.event_names), part.weight_bytes, part.own_types]
        )
        entries[f"weights{rank}"] = _text(weights)
    return entries


def load(path: Path, rank: int) -> SavedProgram:
    """Read the program at `path` on `rank`.

    DamagedFile: it cannot be read, or differs from what was saved. UsageError: it has tasks of types that are not
    registered, or that have changed since it was saved.
    """
    with _reading(path):
        archive = np.load(path)  # stays open, because the file may be replaced or removed
        num_programs = 1 + max(int(name.partition(".")[0]) for name in archive.files)
    first, *others = (_load(path, archive, index, rank) for index in range(num_programs))
    return dataclasses.replace(first, others=tuple(others))


def _load(path: Path, archive: Any, index: int, rank: int) -> SavedProgram:
    with _reading(path):
        shared = _value(archive[f"{index}.shared"])
        buffers = {}
        for name, rows, cols, dtype, space, lamport, offset in shared["buffers"]:
            buffer = Buffer(name, rows, cols, dtype, Space(space), lamport)
            buffers[buffer] = Placed(name, buffer.space, -1, offset, rows, buffer.row_bytes)
        weights = dict(_weight(rank, entry) for entry in _value(archive[f"{index}.weights{rank}"]))
        fields = {name: shared[name] for name in LAYOUT_FIELDS} | {"local_bytes": tuple(shared["local_bytes"])}
        placement = Placement((*buffers.values(), *weights.values()), buffers, weights, **fields)
        ranks = _Ranks(path, archive, index, tuple(shared["digests"]))
    _check_own_types(path, ranks[rank])  # read now, while the caller can still compile a damaged program anew
    return SavedProgram(ranks, placement, digests=ranks.digests)


def _check_own_types(path: Path, part: RankProgram) -> None:
    """UsageError: the program's registered types are missing, or have other arguments or traits than when it was saved."""
    needed_by = f"the saved program {path}"
    if part.own_types and part.header.abi_hash != abi_hash(find_types(part.own_types, needed_by)):
        text = f"{needed_by} was saved with other arguments or traits of {', '.join(part.own_types)}"
        raise UsageError(f"{text}, or by another version of distmk; compile it anew")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its type depends on which byte is wrong
        raise DamagedFile(
            f"the saved program {path} cannot be read ({type(error).__name__}: {error}); start again to make it anew"
        ) from None


class _Ranks(Sequence[RankProgram]):
    """Every rank's part, each read at first use."""

    def __init__(self, path: Path, archive: Any, index: int, digests: tuple[str, ...]) -> None:
        self.digests = digests
        self._path, self._archive, self._index = path, archive, index
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
                self._read[rank] = _rank_program(self._archive, self._index, rank, self.digests[rank])
        return self._read[rank]


def _rank_program(archive: Any, index: int, rank: int, digest: str) -> RankProgram:
    raw = archive[f"{index}.program{rank}"]
    tasks, events, weight_bytes, own_types = _value(archive[f"{index}.names{rank}"])
    header = ProgramHeader.from_buffer(raw)
    sections = {
        name: (struct * getattr(header, count_field)).from_buffer(raw, getattr(header, f"{name}_offset"))
        for name, struct, count_field in SECTIONS
    }
    part = RankProgram(
        header,
        **sections,
        task_names=_names(tasks),
        event_names=_names(events),
        weight_bytes=weight_bytes,
        own_types=tuple(own_types),
    )
    if part.digest() != digest:
        raise ValueError(f"rank {rank} is not the one that was saved")
    return part


def _text(value: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def _value(text: npt.NDArray[np.uint8]) -> Any:
    return json.loads(text.tobytes())


def _indexed(names: Sequence[str]) -> list[Any]:
    """The distinct names, which are few, and for each name its index into them."""
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [list(index), [index[name] for name in names]]


def _names(indexed: list[Any]) -> list[str]:
    distinct, index = indexed
    return [distinct[number] for number in index]


def _encoded(weight: Weight, allocation: Placed) -> list[Any]:
    if weight.data is not None:
        raise ValueError(f"weight {weight.name} was given as an array; such programs cannot be saved")
    tiling = weight.tiling and [weight.tiling.slabs, weight.tiling.paired]
    segments = [[s.tensor, s.row_begin, s.row_end] for s in weight.segments]
    return [
        weight.name, weight.rows, weight.cols, weight.kind.value, weight.col_begin, segments, tiling, weight.col_scale,
        weight.offset, weight.scale, weight.format.id, weight.lead, weight.tail, allocation.offset
    ]  # fmt: skip


def _weight(rank: int, entry: list[Any]) -> tuple[Weight, Placed]:
    name, rows, cols, kind, col_begin, segments, tiling, col_scale, offset, scale, format_id, lead, tail, place = entry
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
        offset=offset,
        scale=scale,
        format=FORMATS[format_id],
        lead=lead,
        tail=tail,
    )
    return weight, Placed(name, Space.LOCAL, rank, place, *weight.extent, read_only=True)
