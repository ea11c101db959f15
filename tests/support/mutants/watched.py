"""Runs one task's body and sees whether it touches what the task does not declare (`Task.accesses`).

The body runs twice, from memories that differ in every byte that the task does not declare to read. A byte that changes and is
not declared as written is a stray write. A byte that comes out differently shows a read that is not declared. Pages of which
nothing is declared have no access, and pages of which nothing is declared as written cannot be written.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from support.mutants.sandbox import Guarded, Host, times

from distmk.abi import LaunchKind, LaunchParams, Space, TaskDesc, WaitRecordABI, split_operand
from distmk.program.program import Program, decode_args
from distmk.tasks import TASK_TYPES, Access

Place = tuple[int, int]  # space and rank
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
PAGE = mmap.PAGESIZE
READ, WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True)
class Moment:
    """A program, the memory of all its ranks, and the iteration that comes next."""

    program: Program
    images: dict[Place, Bytes]
    iteration: int | None = None  # None: not of a decode program


class Watch:
    """Memory and launch parameters for the tasks of a moment, in this process."""

    def __init__(self, library: ctypes.CDLL, moment: Moment) -> None:
        self.library, self.moment, self.program = library, moment, moment.program
        self.memories = {place: Guarded(len(image)) for place, image in moment.images.items()}
        bases = [self.memories[(int(Space.HEAP), rank)].base for rank in range(self.program.num_ranks)]
        self.bases = (ctypes.c_uint64 * len(bases))(*bases)
        heap = [p.offset for p in self.program.placement.pieces if p.space == Space.HEAP]
        self.protocol_bytes = min(heap, default=0)  # control block, events and rings
        self.kept: list[Any] = []
        self.hosts: list[Host] = []
        self.params = [self._params(rank) for rank in range(self.program.num_ranks)]

    def _params(self, rank: int) -> LaunchParams:
        part = self.program.ranks[rank]
        raw = part.to_bytes()
        code = ctypes.create_string_buffer(raw, len(raw))
        records = (WaitRecordABI * (part.header.num_workers + part.header.num_schedulers))()
        self.kept += [code, records]
        params, host = LaunchParams(), Host(self.program, self.moment.iteration is not None)
        host.fill(params)
        self.hosts.append(host)
        params.program, params.heap_bases = ctypes.addressof(code), ctypes.addressof(self.bases)
        params.local_base = self.memories[(int(Space.LOCAL), rank)].base
        params.records, params.deadline_ns = ctypes.addressof(records), 10**10
        return params

    def fault(self, rank: int, index: int, accesses: Sequence[Access], locates: bool = True) -> str:
        """What task `index` of a rank does beside its `accesses`; "": nothing. `locates`: which bytes its results depend on is
        found out, in dozens of runs.
        """
        reads, writes = self._mask(accesses, False), self._mask(accesses, True)
        before, after, told = [], [], []
        for flip in (0x00, 0xFF):
            before.append(self._poisoned(reads, writes, flip))
            after.append(self._run(rank, index, before[-1], reads, writes))
            told.append(self.hosts[rank].logprobs.tobytes())
        if told[0] != told[1]:
            return "tells the host what depends on undeclared bytes"
        for place in before[0]:
            first = self.protocol_bytes if place[0] == Space.HEAP else 0
            changed = [a[place] != b[place] for a, b in zip(after, before, strict=True)]
            stray = (changed[0] | changed[1]) & ~writes[place]
            stray[:first] = False
            if stray.any():
                return f"writes {self._describe(rank, index, place, int(np.flatnonzero(stray)[0]))}, undeclared"
        for place in before[0]:
            first = self.protocol_bytes if place[0] == Space.HEAP else 0
            changed = [a[place] != b[place] for a, b in zip(after, before, strict=True)]
            # What the body has not written differs as it did before.
            unlike = (after[0][place] != after[1][place]) & (changed[0] | changed[1])
            unlike[:first] = False
            if unlike.any():
                where = self._describe(rank, index, place, int(np.flatnonzero(unlike)[0]))
                culprit = self._culprit(rank, index, reads, writes) if locates else "undeclared bytes"
                return f"writes to {where} what depends on {culprit}"
        return ""

    def _poisoned(self, reads: dict[Place, Mask], writes: dict[Place, Mask], flip: int) -> dict[Place, Bytes]:
        """Memory with other bytes where no read is declared: where a write is, such as no mean or maximum of the rest has."""
        return {
            place: np.where(reads[place], image, np.where(writes[place], 0x3C, 0xA5) ^ flip).astype(np.uint8)
            for place, image in self.moment.images.items()
        }

    def _culprit(self, rank: int, index: int, reads: dict[Place, Mask], writes: dict[Place, Mask]) -> str:
        """The allocation whose undeclared bytes the results depend on, and the first of them."""
        images, plain = self.moment.images, self._poisoned(reads, writes, 0)

        def matters(place: Place, begin: int, end: int) -> bool:
            flipped = {p: image.copy() for p, image in plain.items()}
            part = slice(begin, end)
            flipped[place][part] ^= np.where(reads[place][part], 0, 0xFF).astype(np.uint8)
            one, other = (self._run(rank, index, each, reads, writes) for each in (plain, flipped))
            return any(
                ((one[p] != other[p]) & ((one[p] != plain[p]) | (other[p] != flipped[p])))[
                    self.protocol_bytes if p[0] == Space.HEAP else 0 :
                ].any()
                for p in images
            )

        for place in images:
            begin, end = 0, len(images[place])
            if not matters(place, begin, end):
                continue
            while end - begin > 1:
                middle = (begin + end) // 2
                begin, end = (begin, middle) if matters(place, begin, middle) else (middle, end)
            return f"{self._describe(rank, index, place, begin)}, undeclared"
        return "undeclared bytes of several places"

    def _run(
        self, rank: int, index: int, image: dict[Place, Bytes], reads: dict[Place, Mask], writes: dict[Place, Mask]
    ) -> dict[Place, Bytes]:
        for place, memory in self.memories.items():
            memory.bytes[:] = image[place]
            self._protect(place, memory, reads[place], writes[place])
        part, params = self.program.ranks[rank], self.params[rank]
        tasks = params.program + part.header.tasks_offset
        desc = TaskDesc.from_address(tasks + ctypes.sizeof(TaskDesc) * index)
        dispatched = desc.launch == LaunchKind.MASSIVE
        if dispatched:  # its body knows then how many instances there are
            desc.launch = LaunchKind.SPREAD
        spread = desc.launch == LaunchKind.SPREAD
        for instance in range(part.header.num_workers if spread else 1):
            self.library.distmk_run_task(
                ctypes.byref(params), ctypes.byref(desc), ctypes.c_uint64(self.moment.iteration or 0), instance
            )
        if dispatched:
            desc.launch = LaunchKind.MASSIVE
        for memory in self.memories.values():
            memory.protect(0, memory.num_bytes, WRITE)
        images = {place: memory.bytes.copy() for place, memory in self.memories.items()}
        for place, part in times(self.program):
            images[place][part] = image[place][part]
        return images

    def _protect(self, place: Place, memory: Guarded, reads: Mask, writes: Mask) -> None:
        """Take away the access to pages, by runs of pages with the same access."""
        writable = writes.copy()
        if place[0] == Space.HEAP:
            writable[: self.protocol_bytes] = True
        # The memory begins `lead` bytes into its first page.
        lead = memory.base % PAGE
        length = -(-(lead + memory.num_bytes) // PAGE) * PAGE

        def by_page(mask: Mask) -> Mask:
            padded = np.zeros(length, bool)
            padded[lead : lead + memory.num_bytes] = mask
            return padded.reshape(-1, PAGE).any(axis=1)

        access = np.where(by_page(writable), WRITE, np.where(by_page(reads), READ, 0))
        bounds = [0, *(np.flatnonzero(np.diff(access)) + 1).tolist(), len(access)]
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                memory.protect(begin * PAGE - lead, (end - begin) * PAGE, int(access[begin]))

    def _mask(self, accesses: Sequence[Access], write: bool) -> dict[Place, Mask]:
        found = {place: np.zeros(len(image), bool) for place, image in self.moment.images.items()}
        for each in accesses:
            if each.write == write:
                for row in range(each.num_rows):
                    begin = each.offset + row * each.stride
                    found[(each.space, each.rank)][begin : begin + each.row_bytes] = True
        return found

    def _describe(self, rank: int, index: int, place: Place, offset: int) -> str:
        """A byte as an offset from the nearest operand before it."""
        args = decode_args(self.program.ranks[rank].tasks[index])
        operands = []
        for name, kind, *_ in args._fields_:
            space, begin = split_operand(getattr(args, name)) if kind is ctypes.c_uint64 else (0, 0)
            if space == place[0] and begin <= offset:
                operands.append((begin, name))
        begin, name = max(operands, default=(0, "memory"))
        return f"byte {offset - begin} of {name} on rank {place[1]}"


def accesses_of(program: Program, rank: int, index: int) -> list[Access]:
    desc = program.ranks[rank].tasks[index]
    return TASK_TYPES[desc.type].accesses(decode_args(desc), rank, program.num_ranks)


def field_of(program: Program, rank: int, index: int, access: Access) -> str:
    """The argument that an access goes by: read or write of the nearest operand before it."""
    found = []
    for name, operand in _operands(decode_args(program.ranks[rank].tasks[index])):
        space, begin = split_operand(operand)
        if space == access.space and begin <= access.offset:
            found.append((begin, name))
    return f"{'write' if access.write else 'read'} of {max(found)[1]}"


def _operands(args: ctypes.Structure) -> Iterator[tuple[str, int]]:
    """The operands among arguments, by field."""
    for name, kind, *_ in args._fields_:
        value = getattr(args, name)
        if kind is ctypes.c_uint64:
            yield name, value
        elif issubclass(kind, ctypes.Structure):
            yield from ((f"{name}.{inner}", operand) for inner, operand in _operands(value))


def watch(library: ctypes.CDLL, moment: Moment, rank: int, index: int, without: int | None = None) -> str:
    """`Watch.fault` of a task, in a process of its own; `without`: the number of an access that is left out, for which it is
    enough to know that there is a fault.
    """
    accesses = accesses_of(moment.program, rank, index)
    if without is not None:
        dropped = accesses[without]
        accesses = [each for each in accesses if each._replace(early=False) != dropped._replace(early=False)]
    return Watch(library, moment).fault(rank, index, accesses, locates=without is None)
