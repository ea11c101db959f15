"""Fake ranks for single tasks: memory full of NaN, and a check that nothing but the declared output was written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from support.arrays import floats, poison, to_bytes

from distmk.abi import (
    MAGIC,
    Control,
    LaunchParams,
    ProgramHeader,
    Space,
    TaskDesc,
    Trigger,
    operand,
    split_operand,
)
from distmk.backends.host.build import load_runtime
from distmk.graph.regions import ITEM_BYTES
from distmk.tasks import Task
from distmk.tasks.abi_header import abi_hash

NUM_EVENTS = 4
EVENTS_OFFSET = ctypes.sizeof(Control)
HEADER_BYTES = EVENTS_OFFSET + 64 * NUM_EVENTS


class Arena:
    """Heaps of `num_ranks` ranks and the local memory of `rank`, on which single tasks of `rank` run."""

    def __init__(self, rng: np.random.Generator, num_ranks: int = 1, rank: int = 0, num_bytes: int = 1 << 21):
        self.rng, self.num_ranks, self.rank = rng, num_ranks, rank
        self.heaps = [poison(rng, num_bytes) for _ in range(num_ranks)]
        self.local = poison(rng, num_bytes)
        for heap in self.heaps:
            heap[:HEADER_BYTES] = 0
        self.used = {Space.HEAP: HEADER_BYTES, Space.LOCAL: 64}
        self.outputs: list[tuple[np.ndarray, int, int]] = []

    def memory(self, space: Space, rank: int | None = None) -> np.ndarray:
        return self.local if space is Space.LOCAL else self.heaps[self.rank if rank is None else rank]

    def alloc(self, num_bytes: int, space: Space = Space.LOCAL, align: int = 64) -> int:
        """A new operand, after a gap; aligned to `align` bytes and to no more than that."""
        begin = -(-(self.used[space] + int(self.rng.integers(64, 256))) // 128) * 128 + (align if align < 64 else 0)
        self.used[space] = begin + num_bytes
        assert begin + num_bytes + 64 <= self.local.size, "the arena is too small for this test"
        return operand(space, begin)

    def store(
        self, data: np.ndarray | torch.Tensor | ctypes.Structure, space: Space = Space.LOCAL, align: int = 64
    ) -> int:
        raw = to_bytes(data)
        op = self.alloc(raw.size, space, align)
        offset = split_operand(op)[1]
        self.memory(space)[offset : offset + raw.size] = raw
        return op

    def bytes_at(self, op: int, num_bytes: int, rank: int | None = None) -> np.ndarray:
        space, offset = split_operand(op)
        return self.memory(space, rank)[offset : offset + num_bytes]

    def f32(self, op: int, shape: tuple[int, ...], rank: int | None = None) -> np.ndarray:
        return self.bytes_at(op, 4 * int(np.prod(shape)), rank).view(np.float32).reshape(shape)

    def floats(self, op: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return floats(self.bytes_at(op, ITEM_BYTES[dtype] * int(np.prod(shape))), dtype).reshape(shape)

    def output(self, op: int, num_bytes: int, rank: int | None = None, rows: int = 1, stride: int = 0) -> None:
        """Declare bytes that the next task may write."""
        space, offset = split_operand(op)
        for row in range(rows):
            self.outputs.append((self.memory(space, rank), offset + row * stride, num_bytes))

    def run(
        self,
        kind: type[Task],
        args: ctypes.Structure,
        triggers: Iterable[Trigger] = (),
        instance: int = 0,
        iteration: int = 0,
        params: LaunchParams | None = None,
    ) -> None:
        """Run one task; fails if it wrote outside its declared outputs (events are checked by `events`), or if `check` is
        not told of those."""
        self._check_accesses(kind, args)
        triggers = list(triggers)
        header = ProgramHeader(magic=MAGIC, abi_hash=abi_hash(), rank=self.rank, num_ranks=self.num_ranks)
        header.events_heap_offset = EVENTS_OFFSET
        header.num_events, header.num_triggers = NUM_EVENTS, len(triggers)
        header.triggers_offset = ctypes.sizeof(ProgramHeader)
        program = np.frombuffer(bytearray(bytes(header) + b"".join(map(bytes, triggers)) + bytes(64)), dtype=np.uint8)
        bases = np.array([heap.ctypes.data for heap in self.heaps], dtype=np.uint64)
        params = params or LaunchParams()
        params.program, params.heap_bases = program.ctypes.data, bases.ctypes.data
        params.local_base = self.local.ctypes.data
        task = TaskDesc(type=kind.type_id, num_triggers=len(triggers))
        ctypes.memmove(ctypes.addressof(task) + TaskDesc.args.offset, bytes(args), ctypes.sizeof(args))
        before = [memory.copy() for memory in (*self.heaps, self.local)]
        code = load_runtime_once().distmk_run_task(
            ctypes.byref(params), ctypes.byref(task), ctypes.c_uint64(iteration), ctypes.c_uint32(instance)
        )
        assert code == 0, f"distmk_run_task returned {code}"
        self._check_outside(before)
        self.outputs.clear()

    def _check_accesses(self, kind: type[Task], args: ctypes.Structure) -> None:
        writes = [access for access in kind.accesses(args, self.rank, self.num_ranks) if access.write]
        for memory, offset, size in self.outputs:
            known = np.zeros(size, dtype=bool)
            for access in writes:
                for row in range(access.num_rows) if memory is self.memory(Space(access.space), access.rank) else ():
                    begin = access.offset + row * access.stride - offset
                    known[max(0, begin) : max(0, begin + access.row_bytes)] = True
            assert known.all(), f"accesses of {kind.type_name} leave out bytes from {offset} on that it writes"

    def _check_outside(self, before: list[np.ndarray]) -> None:
        names = [*(f"heap of rank {rank}" for rank in range(self.num_ranks)), "local memory"]
        for name, memory, old in zip(names, (*self.heaps, self.local), before, strict=True):
            changed = memory != old
            if memory is not self.local:
                changed[EVENTS_OFFSET:HEADER_BYTES] = False
            for target, offset, size in self.outputs:
                if target is memory:
                    changed[offset : offset + size] = False
            where = np.flatnonzero(changed)
            assert where.size == 0, f"wrote outside its output: {where.size} bytes of {name}, first at {where[0]}"

    def events(self, rank: int) -> list[int]:
        return self.heaps[rank][EVENTS_OFFSET:HEADER_BYTES].view(np.uint64)[::8].tolist()


_runtime: list[ctypes.CDLL] = []


def load_runtime_once() -> ctypes.CDLL:
    if not _runtime:
        _runtime.append(load_runtime())
    return _runtime[0]
