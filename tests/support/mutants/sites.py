"""Every word of every struct of a program, and values to put there."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from distmk.abi import LaunchKind
from distmk.program.layout import Placed
from distmk.program.program import Program, decode_args

SECTIONS = ("tasks", "waits", "triggers", "queues")
PLACED_FIELDS = ("space", "rank", "offset", "rows", "row_bytes", "read_only")
PLACEMENT_FIELDS = ("events_heap_offset", "rings_heap_offset", "jit_capacity", "zeroed_heap_bytes", "heap_bytes")

Key = tuple[str, str]  # struct, field


class Site(NamedTuple):
    """A word of a program. `get` and `put` read and write it; `neighbours`: values of the same field elsewhere."""

    where: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    bits: int  # 0: a Python number without limits
    is_float: bool = False


def sites_of(program: Program) -> dict[Key, list[Site]]:
    """All words of `program`, by struct and field."""
    found: dict[Key, list[Site]] = defaultdict(list)
    for rank, part in enumerate(program.ranks):
        _add_struct(found, "ProgramHeader", f"rank {rank}", [part.header])
        for section in SECTIONS:
            array = getattr(part, section)
            for index, each in enumerate(array):
                where = f"rank {rank} {section}[{index}]"
                if section == "tasks":
                    where += f" {part.task_names[index]}"
                    copies = _copies(part.tasks, index)
                    if copies[0] != index:
                        continue
                    _add_struct(found, "TaskDesc", where, [array[i] for i in copies])
                    args = [decode_args(array[i]) for i in copies]
                    _add_struct(found, type(args[0]).__name__, where, args)
                else:
                    _add_struct(found, type(each).__name__, where, [each])
        for index in range(len(part.launches)):
            found[("launches", "task")].append(_item(part.launches, index, f"rank {rank} launches[{index}]"))
    for index in range(len(program.placement.pieces)):
        for field in PLACED_FIELDS:
            found[("Placed", field)].append(_placed(program, index, field))
    for field in PLACEMENT_FIELDS:
        found[("Placement", field)].append(_placement(program, field))
    return found


def _copies(tasks: Any, index: int) -> list[int]:
    """The descriptors of a spread task; else the descriptor alone."""
    if tasks[index].launch != LaunchKind.SPREAD:
        return [index]
    return [i for i, desc in enumerate(tasks) if desc.launch == LaunchKind.SPREAD and desc.order == tasks[index].order]


def _add_struct(found: dict[Key, list[Site]], name: str, where: str, copies: list[Any]) -> None:
    for field, kind, *_ in copies[0]._fields_:
        if issubclass(kind, ctypes.Array):
            continue  # the arguments of a task, which are a struct of their own
        if issubclass(kind, ctypes.Structure):
            _add_struct(found, kind.__name__, f"{name}.{field} of {where}", [getattr(each, field) for each in copies])
            continue

        def put(value: Any, field: str = field) -> None:
            for each in copies:
                setattr(each, field, value)

        found[(name, field)].append(
            Site(
                f"{name}.{field} of {where}",
                lambda field=field: getattr(copies[0], field),  # type: ignore[misc]
                put,
                8 * ctypes.sizeof(kind),
                kind is ctypes.c_float,
            )
        )


def _item(array: Any, index: int, where: str) -> Site:
    return Site(where, lambda: array[index], lambda value: array.__setitem__(index, value), 32)


def _placed(program: Program, index: int, field: str) -> Site:
    def put(value: Any) -> None:
        pieces = list(program.placement.pieces)
        pieces[index] = dataclasses.replace(pieces[index], **{field: value})
        program.placement = dataclasses.replace(program.placement, pieces=tuple(pieces))

    def get() -> Any:
        return getattr(program.placement.pieces[index], field)

    piece: Placed = program.placement.pieces[index]
    return Site(f"Placed.{field} of {piece.name}", get, put, 0)


def _placement(program: Program, field: str) -> Site:
    def put(value: Any) -> None:
        program.placement = dataclasses.replace(program.placement, **{field: value})

    return Site(f"Placement.{field}", lambda: getattr(program.placement, field), put, 0)


def values(site: Site, others: list[Site], random_: random.Random) -> list[Any]:
    """What a mutation may put at `site`, without what is there."""
    old = site.get()
    if isinstance(old, bool):
        return [not old]
    near = random_.choice(others).get()
    if site.is_float:
        raw = struct.unpack("<I", struct.pack("<f", old))[0] ^ 1 << random_.randrange(32)
        drawn = [old + 1, old - 1, 0.0, -1.0, 3e38, float("inf"), float("nan"), random_.gauss(0, 10), near]
        drawn.append(struct.unpack("<f", struct.pack("<I", raw))[0])
        return [value for value in drawn if value != old]
    old = int(old)
    bits = site.bits or 32
    most = 2**bits - 1
    drawn = [old + 1, old - 1, 0, 1, most, random_.randrange(2**bits), random_.randrange(2 * abs(old) + 2), near]
    drawn += [old ^ 1 << random_.randrange(bits), old + random_.choice([2, 4, 8, 16, 64]), max(0, old - 4), old // 2]
    if site.bits:
        drawn = [int(value) & most for value in drawn]
    return [value for value in drawn if value != old]
